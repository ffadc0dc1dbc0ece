"""Tells of errors that no code expects, where the source process tries again: else nobody would hear of them."""

from __future__ import annotations

import logging

import pulsar
from deltalake.exceptions import DeltaError

from conf.errors import DelayLakeError, one_line
from status.alerts import INTERNAL_ERROR, Alerts

_log = logging.getLogger(__name__)

# What a broker, a network, a disk or a table may do at any time. What lasts of it has alerts of its own.
_EXPECTED = (DelayLakeError, OSError, pulsar.PulsarException, DeltaError)

_MOST_CHARACTERS = 300  # of an error's text, in which there may be parts of a message


def note_error(alerts: Alerts, name: str, error: Exception) -> None:
    """Begins an alert and logs the stack, if an error is none of those that a broker, disk or table brings about.

    Args:
        alerts: of the source process.
        name: the topic partition, or what was done.
        error: after which the caller tries again.
    """
    if not isinstance(error, _EXPECTED):
        text = f"{type(error).__name__}: {one_line(error)[:_MOST_CHARACTERS]}"
        _log.error("%s: %s", name, text, exc_info=error)
        alerts.add(INTERNAL_ERROR, name, f"{text}; it is tried again", 1)
