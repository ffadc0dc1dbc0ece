"""The state of a job, rebuilt from the Delta tables."""
