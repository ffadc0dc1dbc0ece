"""What commands have made of messages, as a shard keeps it: who does not get them any more, and their other times."""
