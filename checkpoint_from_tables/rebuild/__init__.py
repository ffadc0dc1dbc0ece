"""Rebuilds the state of a job from the Delta tables."""
