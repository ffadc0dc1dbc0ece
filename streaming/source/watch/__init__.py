"""The watch over source topics: entries that did not come, and topics that stand still."""
