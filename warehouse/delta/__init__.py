"""Delta tables, versions and commits, and who may commit."""
