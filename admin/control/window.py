"""A window of requests: several are sent ahead of the outcomes of others, and repeated if no outcome comes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from admin.control.requests import ControlRequest, Outcome
from tracker.wire.delaylake_pb2 import ControlOutcome

_SHOWN_IDS = 5
_MOST_REPEATED = 1_000  # the maximum number of requests that are repeated at a time


class Window:
    """Requests to be sent, several of them ahead of the outcomes of others.

    Args:
        requests: the requests.
        most: about the maximum number of messages in commands without an answer: enough that the job always has some,
            and few enough that outcomes begin soon.
    """

    def __init__(self, requests: Iterable[ControlRequest], most: int) -> None:
        self._coming = iter(requests)
        self._most = most
        self._ahead = 0
        self.waiting: dict[str, ControlRequest] = {}  # requests that were sent and not answered, by request id

    def no_answer(self, timeout_seconds: float) -> str:
        """Returns the error's text if no outcome came in time, with some request ids to look up in `outcomes`."""
        ids = ", ".join(list(self.waiting)[:_SHOWN_IDS])
        return f"no answer within {timeout_seconds:g} s (does the job run?); request id: {ids}"

    def next(self) -> ControlRequest | None:
        """Returns the next request to send; None: there is none, or too many messages wait for outcomes."""
        if self._ahead >= self._most:
            return None
        request = next(self._coming, None)
        if request is not None:
            self.waiting[request.request_id] = request
            self._ahead += request.n_messages
        return request

    def repeat(self) -> list[ControlRequest]:
        """Returns requests to be repeated, once each, because their outcomes may have been missed.

        A reader misses outcomes if the broker unloads the outcome topic. Not all of many requests are returned: if none
        of them gets an answer, the job is not running.
        """
        waiting = itertools.islice(self.waiting.values(), _MOST_REPEATED)
        return [request for request in waiting if request.repeat()]

    def take(self, published: ControlOutcome) -> list[Outcome]:
        """Takes a published outcome.

        Returns:
            as `ControlRequest.take`; empty if no request waits for the outcome.
        """
        request = self.waiting.get(published.request_id)
        if request is None:
            return []
        outcomes = request.take(published)
        if request.is_answered:
            del self.waiting[published.request_id]
            self._ahead -= request.n_messages
        return outcomes
