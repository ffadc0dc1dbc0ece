"""Control commands: decoding, matching with messages, applying, and what has to be remembered of them."""
