"""The routes with which a checkpoint's last batch was made."""

from __future__ import annotations

import json
from pathlib import Path

from streaming.clock import Offset
from streaming.rebuild import Rebuilt
from streaming.routes import KnownRoutes


def last_routes(checkpoint: Path) -> KnownRoutes | None:
    """The routes of the last batch; None: there was none, or it did not keep them."""
    offsets = checkpoint / "query" / "offsets"
    number = max((int(file.name) for file in offsets.glob("[0-9]*") if file.name.isdigit()), default=None)
    if number is None:
        offset = Rebuilt(checkpoint).offset
    else:
        offset = Offset.from_json(json.loads((offsets / str(number)).read_text().splitlines()[-1]))
    return None if offset is None else offset.known_routes
