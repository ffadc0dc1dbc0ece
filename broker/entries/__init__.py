"""The entries of a topic partition: gaps between them, ids of their messages, and their keys."""
