"""Clients of the service and of the broker, and the keys and tokens that they come with."""
