"""Commands about messages: sent, listed and changed."""
