"""The Delta tables: their columns, commits and epochs, and what else is written down between runs."""
