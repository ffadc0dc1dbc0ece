"""Reads and checks the properties of messages: time, schedule key, retry, position, and those of delivered messages."""
