"""Output that nobody reads any more, as after `| head -1`."""

from __future__ import annotations

import os


def write_nowhere(descriptor: int) -> None:
    """Lets a file descriptor lead nowhere: what is still to be written to it is dropped, without an error."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)
