"""The properties of a message that say when it is due and in whose place, and what makes them wrong."""
