"""What monitoring asks of the API: health and metrics."""
