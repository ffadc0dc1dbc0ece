"""The hint `_last_checkpoint` in a table's log, which may name a checkpoint that is not there.

So it is after an incomplete copy or a loss of power. delta-rs then can't open the table, though its commits are there.
"""

from __future__ import annotations

import json
import logging
import re

from deltalake import DeltaTable

from warehouse.storage import Storage

_log = logging.getLogger(__name__)

_HINT = "_delta_log/_last_checkpoint"
COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\..*(?:parquet|json)")


def drop_wrong_hint(uri: str) -> None:
    """Deletes the hint of a table's log if it can't be read, or no checkpoint of its version or a later one exists.

    It is logged. Others may write the table meanwhile: without a hint they look at the log itself.

    Args:
        uri: the table's folder or URI; there may be no table.
    """
    files = Storage(uri)
    content = files.read(_HINT)
    if content is None:
        return
    hinted = _version(content)
    if hinted is not None and any(version >= hinted for version in _versions(files, _CHECKPOINT)):
        return
    files.delete(_HINT)
    _log.warning("%s: removed from its log: _last_checkpoint, which names no checkpoint that is there", uri)


def opened_without_hint(uri: str) -> DeltaTable | None:
    """Opens the newest version of a table whose hint is wrong, and changes nothing.

    Args:
        uri: the table's folder or URI.

    Returns:
        the table; None: there is no hint that could be wrong.

    Raises:
        DeltaError: the table can't be opened without the hint, either.
    """
    files = Storage(uri)
    hinted = _version(files.read(_HINT) or b"")
    newest = max(_versions(files, COMMIT), default=None)
    if hinted is None or newest is None or hinted == 0:
        return None
    # delta-rs passes over a hint that is later than the version which it is to open.
    table = DeltaTable(uri, version=min(hinted - 1, newest))
    table.update_incremental()
    return table


def newest_commit(uri: str) -> int:
    """Returns the newest version of a table by the names in its log, without opening it; -1: there is no table.

    Raises:
        OSError: the log can't be listed.
    """
    return max(_versions(Storage(uri), COMMIT), default=-1)


def _version(hint: bytes) -> int | None:
    """Returns the version that a hint names; None: it names none, and delta-rs passes over it."""
    try:
        found = json.loads(hint)
    except (ValueError, RecursionError):
        return None
    version = found.get("version") if isinstance(found, dict) else None
    return version if isinstance(version, int) and version >= 0 else None


def _versions(files: Storage, name: re.Pattern[str]) -> list[int]:
    found = (name.fullmatch(file) for file in files.sizes("_delta_log"))
    return [int(match[1]) for match in found if match]
