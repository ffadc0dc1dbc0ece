"""The code that runs in the driver: makes a Spark job of each tick's release, and writes its deliveries."""
