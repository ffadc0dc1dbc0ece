"""The state of messages after commands, as a shard keeps it: who does not get them any more, and their other times."""
