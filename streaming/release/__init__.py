"""Releases: planned, sent to the destinations at their times, and written down."""
