"""The cluster of a topic's entries: this one, another that replicates to it, or a new one with the same topics."""
