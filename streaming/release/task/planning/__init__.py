"""The plan of a release: what is sent where, when and under which names. It is the same each time."""
