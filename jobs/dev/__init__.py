"""What `delaylake dev` starts: broker, job and API, which end with it."""
