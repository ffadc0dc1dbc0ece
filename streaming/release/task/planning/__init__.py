"""What is sent where, when, and under which names: worked out before anything is sent, and the same each time."""
