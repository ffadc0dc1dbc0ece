"""Backups: copies of the warehouse's tables in another place, and how a backup becomes a warehouse."""
