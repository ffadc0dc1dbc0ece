"""The REST API, its security, the dashboard, and clients that send control commands."""
