"""What the service talks to: Pulsar, other systems, an object storage, a collector of traces; real ones and fakes."""
