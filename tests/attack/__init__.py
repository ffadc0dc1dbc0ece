"""Attacks on a running job beside honest traffic: what each may do, and what becomes of the others' messages."""
