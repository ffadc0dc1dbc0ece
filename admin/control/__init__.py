"""Clients that send control commands and wait for their outcomes, over the control topic or the REST API."""
