"""What both clients are made with: where the admin API and the broker are."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import httpx

from delaylake.arguments import check_texts
from delaylake.broker import CONTROL_TOPIC, OUTCOME_TOPIC, Broker

Token = str | Callable[[], str]

_Http = TypeVar("_Http")

TIMEOUT_SECONDS = 30.0

_BROKER = re.compile(r"pulsar(\+ssl)?://.")


class Connections(Generic[_Http]):
    """The way to an admin API, to a broker, or to both.

    Args:
        url: of the admin API. Without it commands go over the control topic, and what waits can't be listed.
        broker: of Pulsar, such as `pulsar://localhost:6650`: messages are sent there. Needs the extra `pulsar`.
        token: of Pulsar's, for both; a function is asked for it each time.
        timeout_seconds: for a call and all its repetitions: connecting, and the whole answer.
        http: an httpx client of your own, with proxies or certificates; it is not closed.
        broker_options: further parameters of `pulsar.Client`.
        control_topic, outcome_topic: where the service's settings have others.

    Raises:
        TypeError: an address is no text, or the time-out no number.
        ValueError: neither of both is given, or an address or the time-out can't be one.
        DelayLakeError: the extra `pulsar` is not installed.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        broker: str | None = None,
        token: Token | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        http: _Http | None = None,
        broker_options: Mapping[str, Any] | None = None,
        control_topic: str = CONTROL_TOPIC,
        outcome_topic: str = OUTCOME_TOPIC,
    ) -> None:
        if url is None and broker is None:
            raise ValueError("an admin API (url) or a broker is needed")
        check_texts(url=url, broker=broker, control_topic=control_topic, outcome_topic=outcome_topic)
        if url is not None and not _is_http(url):
            raise ValueError(f"url is none of an admin API, as http://127.0.0.1:8081: {url!r}")
        if broker is not None and not _BROKER.match(broker):
            raise ValueError(f"broker is none of Pulsar, as pulsar://localhost:6650, or pulsar+ssl://: {broker!r}")
        if not isinstance(timeout_seconds, int | float):
            raise TypeError(f"timeout_seconds is no number: {timeout_seconds!r}")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be above 0: {timeout_seconds!r}")
        get_token = None if token is None else lambda: (token if isinstance(token, str) else token()).strip()
        self._url = url.rstrip("/") if url else None
        self._token = get_token
        self._timeout_seconds = timeout_seconds
        self._is_closed = False
        self._is_own_http = http is None
        self._http = self._make_http() if http is None else http
        self._broker = (
            Broker(broker, get_token, timeout_seconds, control_topic, outcome_topic, dict(broker_options or {}))
            if broker is not None
            else None
        )

    def _make_http(self) -> _Http:
        raise NotImplementedError

    def _deadline(self) -> float:
        """Returns when a call that begins now has to end, by the monotonic clock."""
        return time.monotonic() + self._timeout_seconds

    def _seconds_until(self, deadline: float) -> float:
        """Returns how much of its time a call has left; some always is."""
        return max(deadline - time.monotonic(), 0.001)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token()}"} if self._token else {}

    def _api(self) -> str:
        self._check_open()
        if self._url is None:
            raise ValueError("what waits is listed by an admin API: give its url")
        return self._url

    def _pulsar(self) -> Broker:
        self._check_open()
        if self._broker is None:
            raise ValueError("messages are sent to a broker: give its address as broker")
        return self._broker

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the client is closed")


def _is_http(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)
