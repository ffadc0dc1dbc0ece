"""Shaped release: messages due beyond a subscription's rate, or outside its windows, are moved to the next place."""
