"""Pulsar's side: the client, the admin REST API, positions and gaps of source topics, and the embedded broker."""
