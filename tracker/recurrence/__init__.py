"""Recurring messages: when the occurrences of a schedule are, by its properties alone."""
