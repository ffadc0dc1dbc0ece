"""Repeated commands, and commands that wait for their message."""
