"""Reads what waits in other systems, a module each, and imports it."""
