"""Watches source topics for missing entries, and for topics that stand still."""
