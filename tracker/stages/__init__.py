"""Stages of a shard's tick that combine the tracker, the commands and the releases in flight."""
