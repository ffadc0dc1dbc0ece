"""Delta tables: opening, reading, committing, and the epoch that says who may commit."""
