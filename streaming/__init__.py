"""The Spark streaming job: source, stateful operator, release and sinks, over one checkpoint."""
