"""The tracker proper: time slots, the mutable bucket, and the index bits of known positions."""
