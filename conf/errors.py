"""The root of the errors that a user can do something about."""


class DelayLakeError(Exception):
    """An expected failure. The message is one line that says what is wrong and what to do."""

    @property
    def lines(self) -> list[str]:
        """A line for each thing that is wrong."""
        return [one_line(self)]


def one_line(error: object) -> str:
    """Returns an error, or what another program says of one, as one line."""
    return " ".join(str(error).split())
