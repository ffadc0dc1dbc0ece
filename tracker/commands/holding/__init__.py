"""Messages that are held back, at which pace they go out again, and when they are given up."""
