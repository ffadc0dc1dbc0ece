"""Schedule keys: of the messages with the same key one is delivered."""
