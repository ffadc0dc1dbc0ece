"""A checkpoint rebuilt from the Delta tables, and messages imported in bulk."""
