"""Maintenance of the tables: files are merged, and rows that nobody needs are removed."""
