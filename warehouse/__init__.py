"""The Delta tables: their columns, commits, epochs and queries."""
