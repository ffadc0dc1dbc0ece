"""Backups: copies of the warehouse's tables in another place, and how they become a warehouse."""
