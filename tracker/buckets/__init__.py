"""The delayed delivery tracker: time slots, the mutable bucket, and the index bits of known positions."""
