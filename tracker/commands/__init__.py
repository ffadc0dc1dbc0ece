"""Control commands: decoding them, matching them with messages, applying them, and the state that they leave."""
