"""Spark's stateful operator: the tracker of each shard over Spark's state."""
