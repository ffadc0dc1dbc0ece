"""Clients for Pulsar's admin REST API."""
