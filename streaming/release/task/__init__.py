"""The code that runs in Spark's tasks: plans a release, and sends each message at its time."""
