"""Access to Pulsar: its client, its admin REST API, positions and gaps of source topics, and the embedded broker."""
