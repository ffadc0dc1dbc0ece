"""The settings and their validation, and the default configuration of Spark, log4j and the embedded broker."""
