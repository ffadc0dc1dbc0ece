"""Handles output that nobody reads any more, as after `| head -1`."""

from __future__ import annotations

import os


def redirect_to_null(descriptor: int) -> None:
    """Redirects a file descriptor to the null device, so that further output is dropped without an error."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)
