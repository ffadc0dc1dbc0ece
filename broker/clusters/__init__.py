"""Which cluster's entries a topic has: this one's, another's that Pulsar replicates, or one's that was made anew."""
