"""The settings file, its validation, and the defaults of Spark, log4j and the embedded broker."""
