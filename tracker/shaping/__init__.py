"""Shaped release: what comes due beyond a subscription's rate, or outside its windows, is moved to the next place."""
