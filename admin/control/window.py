"""Requests that are sent some ahead of the outcomes of others, and once more where none has come."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from admin.control.requests import ControlRequest, Outcome
from tracker.wire.delaylake_pb2 import ControlOutcome

_SHOWN_IDS = 5
_MOST_REPEATED = 1_000  # requests that are sent again at a time


class Window:
    """Requests that are to be sent, some of them ahead of the outcomes of others.

    Args:
        most: how many messages may be named by commands that are not answered yet, about: enough for the job to have
            some at hand always, and few enough that the outcomes begin soon.
    """

    def __init__(self, requests: Iterable[ControlRequest], most: int) -> None:
        self._coming = iter(requests)
        self._most = most
        self._ahead = 0
        self.waiting: dict[str, ControlRequest] = {}  # by request id: sent, and not answered

    def no_answer(self, timeout_seconds: float) -> str:
        """Returns the error's text where no outcome came in time, with some request ids, which `outcomes` has, too."""
        ids = ", ".join(list(self.waiting)[:_SHOWN_IDS])
        return f"no answer within {timeout_seconds:g} s (does the job run?); request id: {ids}"

    def next(self) -> ControlRequest | None:
        """Returns the next request to send; None: there is none, or too many messages wait for their outcomes."""
        if self._ahead >= self._most:
            return None
        request = next(self._coming, None)
        if request is not None:
            self.waiting[request.request_id] = request
            self._ahead += request.n_messages
        return request

    def repeat(self) -> list[ControlRequest]:
        """Returns requests that are to be sent again, once each: their outcomes may have been missed.

        A reader passes over what the broker drops when it unloads the outcome topic. Of many requests some are
        returned: where nothing is answered, the job is not there to answer more.
        """
        waiting = itertools.islice(self.waiting.values(), _MOST_REPEATED)
        return [request for request in waiting if request.repeat()]

    def take(self, published: ControlOutcome) -> list[Outcome]:
        """Takes an outcome as it was published.

        Returns:
            what `ControlRequest.take` does; none where it is of no request that waits.
        """
        request = self.waiting.get(published.request_id)
        if request is None:
            return []
        outcomes = request.take(published)
        if request.is_answered:
            del self.waiting[published.request_id]
            self._ahead -= request.n_messages
        return outcomes
