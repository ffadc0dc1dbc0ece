"""Reads the routes of a checkpoint's last batch."""

from __future__ import annotations

from pathlib import Path

from streaming.checkpoint.checkpoint import Checkpoint
from streaming.checkpoint.prepared import PreparedState
from warehouse.routes.known_routes import KnownRoutes


def last_routes(checkpoint: Path) -> KnownRoutes | None:
    """Returns the routes of the last batch, else of a rebuild; None: the checkpoint has neither.

    Args:
        checkpoint: the checkpoint's folder.

    Raises:
        CheckpointError: the newest offset can't be read.
    """
    offset = Checkpoint(checkpoint).newest_offset() or PreparedState(checkpoint).offset
    return None if offset is None else offset.known_routes
