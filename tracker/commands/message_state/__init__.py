"""The state of messages after commands: for which subscriptions they are cancelled, and the times they moved to."""
