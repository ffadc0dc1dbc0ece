"""Spark's source: source and control topics are read, and batches are cut."""
