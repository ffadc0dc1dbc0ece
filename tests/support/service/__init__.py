"""The service as it runs: a job as a user starts it, its dashboard, and all of it in one process without Spark."""
