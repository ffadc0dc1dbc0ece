"""Finds the next occurrences of recurring messages, for a checkpoint that is rebuilt from the tables."""
