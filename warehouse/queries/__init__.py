"""Queries over the tables, one module for each question that the job, the API or a command asks."""
