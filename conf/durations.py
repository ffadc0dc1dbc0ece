"""Durations as settings have them: `90s`, `5m`, `2h`, `1d`, or milliseconds."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_DURATION = re.compile(r"([0-9]{1,15})(ms|s|m|h|d)?")
_UNIT_MILLIS = {None: 1, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def _millis(given: object) -> object:
    match = _DURATION.fullmatch(given) if isinstance(given, str) else None
    if match:
        return int(match[1]) * _UNIT_MILLIS[match[2]]
    if isinstance(given, str):
        raise ValueError("must be a duration, as 90s, 5m, 2h, 1d or milliseconds")
    return given


# A number of milliseconds.
Duration = Annotated[int, BeforeValidator(_millis)]
