"""The stages of a shard's tick that are more than a call of the tracker or of the commands."""
