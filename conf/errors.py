"""The root of the errors that a user can do something about."""


class DelayLakeError(Exception):
    """An expected failure. The message is one line that says what is wrong and what to do."""
