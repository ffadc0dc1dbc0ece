"""Makes a backup a job's warehouse, which reads its source topics again, from the same broker or another."""
