"""The dashboard: pages over the same tables, and with the same calls, as the admin API."""
