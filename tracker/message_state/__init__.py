"""What is known of messages that are not as they came: cancelled, moved, delivered before."""
