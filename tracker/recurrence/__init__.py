"""Recurring messages: computes when the occurrences of a schedule are, from its properties alone."""
