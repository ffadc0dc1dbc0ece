"""Readings of what the docs say, as naive as can be, to judge by."""
