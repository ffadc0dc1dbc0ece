"""Holding messages back, the pace at which they go out afterwards, and giving them up."""
