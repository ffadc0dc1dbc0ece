"""The wire formats: the delayed index, control commands and outcomes, and Pulsar's message id."""
