"""The API's health checks and metrics."""
