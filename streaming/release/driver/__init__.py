"""The code that runs in the driver: each tick's release becomes a Spark job, and what has arrived is written down."""
