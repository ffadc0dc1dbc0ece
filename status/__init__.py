"""The running job's status, its alerts, and its metrics."""
