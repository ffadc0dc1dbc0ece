"""A backup becomes a job's warehouse: source topics are read again, from this broker or another."""
