"""Spark's stateful operator: runs the tracker of each shard on Spark's state."""
