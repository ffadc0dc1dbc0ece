"""Inputs made up at random, and how many of them are tried."""
