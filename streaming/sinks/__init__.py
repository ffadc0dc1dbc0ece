"""The sinks of a batch's output: tables, outcome topic and releaser."""
