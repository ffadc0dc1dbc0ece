"""Schedule keys: one of a topic's messages with the same key waits, and supersedes the others."""
