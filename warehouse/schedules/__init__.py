"""Recurring messages, read from the Delta tables."""
