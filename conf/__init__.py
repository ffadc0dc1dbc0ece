"""The settings and their validation, the errors, and the configuration of Spark, log4j and the embedded broker."""
