"""Rebuilds a checkpoint from the Delta tables, restores backups, and imports messages in bulk."""
