"""The code that runs in Spark's tasks: a release is planned and sent, each message at its time."""
