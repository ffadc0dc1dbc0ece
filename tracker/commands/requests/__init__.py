"""Commands that were sent before: those that come again, and those that wait for their message."""
