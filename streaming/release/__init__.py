"""Releases: due messages are planned, sent to their destinations on time, and written to the tables."""
