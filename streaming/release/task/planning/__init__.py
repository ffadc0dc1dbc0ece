"""The plan of a release: where, when and under which names its messages are sent. It is the same in each attempt."""
