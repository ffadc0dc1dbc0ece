"""Tells the job's outcomes from those of others who may produce on the outcome topic."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from status.job_status import known_status

_LOOK_SECONDS = 0.5
_MAX_LOGGED = 20  # producers that are logged: anybody may invent any number

_log = logging.getLogger(__name__)


class Produced(Protocol):
    """A message of Pulsar's client."""

    def producer_name(self) -> str:
        """Returns the name of its producer."""


class OutcomeSource:
    """Checks that outcomes were published by the job of a warehouse, whose status has the name of its producer.

    As long as the job's producer is connected, the broker lets nobody else produce under its name. Before a job of this
    version has run on the warehouse, its name is not known, and everybody is believed.

    Args:
        warehouse: folder or URI of the tables, where the status is.
    """

    def __init__(self, warehouse: str) -> None:
        self._warehouse = warehouse
        self._name = ""
        self._looked_at = -_LOOK_SECONDS
        self._logged: set[str] = set()

    def is_of_job(self, outcome: Produced) -> bool:
        """Whether the job has published an outcome; logs who else has."""
        name = outcome.producer_name()
        if name != self._name and time.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            status = known_status(self._warehouse)
            self._name = status.outcome_producer if status is not None else ""
        if self._name in ("", name):
            return True
        if name not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(name)
            _log.warning(
                "an outcome of the producer %r is not believed, the job is %r: see SECURITY.md for who may produce "
                "there",
                name[:200],
                self._name,
            )
        return False
