"""The audit: whether every message is accounted for, by the tables and by the broker."""
