"""Checks of callers' arguments; each error names the wrong argument. Times are checked in `times.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_MAX_LONG = 2**63 - 1
_MAX_INT = 2**31 - 1


def check_text(name: str, text: str, max_bytes: int | None = None) -> None:
    """Checks a text that will be sent as UTF-8.

    Args:
        name: the argument's name, for errors.
        max_bytes: the maximum length in UTF-8 of a text that must not be empty; None: any length.

    Raises:
        TypeError: it is not a text.
        ValueError: it has half a surrogate pair, is empty, or too long.
    """
    if not isinstance(text, str):
        raise TypeError(f"{name} is no text: {text!r}")
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name} has half a surrogate pair: {text[:200]!r}") from None
    if max_bytes is not None and not 0 < n_bytes <= max_bytes:
        raise ValueError(f"{name} is empty or has more than {max_bytes} bytes")


def check_texts(**texts: str | None) -> None:
    """As `check_text`, for each argument that is not None."""
    for name, text in texts.items():
        if text is not None:
            check_text(name, text)


def check_request_id(request_id: str) -> None:
    """Raises ValueError for a request id that the admin API does not allow."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise ValueError(f"request_id must be 1 to 128 characters of ASCII without spaces: {request_id[:200]!r}")


def check_number(name: str, number: int, least: int, most: int = _MAX_LONG) -> None:
    """Raises ValueError for anything but a whole number from `least` to `most`."""
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise ValueError(f"{name} must be a whole number, {least} to {most}: {number!r}")


def check_position(name: str, ledger_id: int, entry_id: int, partition: int, batch_index: int) -> None:
    """Raises ValueError if a part of a message's id is out of Pulsar's range."""
    check_number(f"{name}: its ledger", ledger_id, 0)
    check_number(f"{name}: its entry", entry_id, 0)
    check_number(f"{name}: its partition", partition, -1, _MAX_INT)
    check_number(f"{name}: its batch index", batch_index, -1, _MAX_INT)


def checked_properties(properties: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a copy of a message's properties; an empty one for None.

    Raises:
        TypeError: they are not a mapping of texts.
        ValueError: one has half a surrogate pair.
    """
    if properties is None:
        return {}
    if not isinstance(properties, Mapping):
        raise TypeError(f"properties is no mapping: {properties!r}")
    for name, value in properties.items():
        check_text("the name of a property", name)
        check_text(f"the property {name!r}", value)
    return dict(properties)
