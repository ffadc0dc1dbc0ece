"""The base class of all expected errors."""

from __future__ import annotations

import re

# Parts of deltalake's error texts: colours with arrows, and the frames of a stack.
_ARROW = re.compile("\\s*\x1b\\[[0-9;]*m\\S*\x1b\\[[0-9;]*m\\s*")
_FRAMES = re.compile(r"\n\s*0: .*\n\s*1: .*", re.DOTALL)


class DelayLakeError(Exception):
    """An expected failure. The message is one line that says what is wrong and what to do."""

    @property
    def lines(self) -> list[str]:
        """The message as lines, one for each thing that is wrong."""
        return [one_line(self)]


class UnreadableWarehouseError(DelayLakeError):
    """The warehouse, or a file in it, exists and can't be read.

    Args:
        warehouse: a folder or URI.
        cause: the system's error.
    """

    def __init__(self, warehouse: str, cause: object) -> None:
        what = f"the warehouse {warehouse} can't be read ({one_line(cause)})"
        super().__init__(f"{what}: see `warehouse` in the settings")


def printable(text: str, kept: str = "") -> str:
    """Returns a text with its unprintable characters escaped: they would control a terminal, or reorder its text.

    Args:
        kept: characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def one_line(error: object) -> str:
    """Returns an error, or its text, as one line of printable characters: others may have written parts of it."""
    return printable(" ".join(_ARROW.sub(": ", _FRAMES.sub("", str(error))).split()))
