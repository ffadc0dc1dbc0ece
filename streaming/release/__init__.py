"""Releases: what comes due is planned, sent to the destinations at its time, and written down."""
