"""Consumers of topic partitions, and the messages that they receive as columns."""
