"""The running job's status, its troubles, and its metrics."""
