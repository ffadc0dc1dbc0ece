"""Pulsar's admin REST API, and what is asked of it."""
