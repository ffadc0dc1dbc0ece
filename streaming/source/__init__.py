"""Spark's source: reads source topics and the control topic, and decides where batches end."""
