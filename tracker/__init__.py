"""The delayed delivery tracker as plain Python: no Spark, no I/O, no clock of its own."""
