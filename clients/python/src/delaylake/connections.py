"""The connections of both clients to the admin API and to the broker, and the calls that go over them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from delaylake import paging, rest
from delaylake.arguments import check_texts
from delaylake.broker import CONTROL_TOPIC, OUTCOME_TOPIC, Broker
from delaylake.commands import END_SCHEDULE, Command
from delaylake.errors import Unavailable
from delaylake.http_library import httpx
from delaylake.message_ids import MessageId, Outcome, Redriven
from delaylake.scheduled import Scheduled
from delaylake.threads import in_thread

Token = str | Callable[[], str]

_Http = TypeVar("_Http")
_Listed = TypeVar("_Listed")
_Result = TypeVar("_Result")

TIMEOUT_SECONDS = 30.0

_BROKER = re.compile(r"pulsar(\+ssl)?://.")


class Connections(Generic[_Http]):
    """Connections to an admin API, to a broker, or to both.

    Args:
        url: URL of the admin API. Without it commands go over the control topic, and pending messages can't be listed.
        broker: URL of Pulsar, such as `pulsar://localhost:6650`, to which messages are sent. Needs the extra `pulsar`.
            Without it the admin API sends them.
        token: Pulsar token for both; a function is called for it each time.
        timeout_seconds: time for a call with all its repetitions: connecting, and the whole answer.
        http: an httpx client of your own, with proxies or certificates; it is not closed.
        broker_options: further parameters of `pulsar.Client`.
        control_topic, outcome_topic: the topics' names, if the service's settings have others.

    Raises:
        TypeError: an address is not a text, or the time-out is not a number.
        ValueError: neither url nor broker is given, or an address or the time-out is wrong.
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
        """Returns the time by the monotonic clock, in seconds, at which a call that begins now has to end."""
        return time.monotonic() + self._timeout_seconds

    def _seconds_until(self, deadline: float) -> float:
        """Returns the seconds that a call has left; never 0."""
        return max(deadline - time.monotonic(), 0.001)

    def _request(self, call: rest.Call) -> dict[str, Any]:
        """Returns the arguments for httpx's `request`."""
        authorization = {"Authorization": f"Bearer {self._token()}"} if self._token else {}
        return {
            "method": call.method,
            "url": self._api() + call.path,
            "params": call.params,
            "json": call.content,
            "headers": call.headers | authorization,
        }

    def _goes_over_the_api(self, command: Command) -> bool:
        return self._url is not None or command.operation == END_SCHEDULE

    def _api(self) -> str:
        self._check_open()
        if self._url is None:
            raise ValueError("what waits is listed by an admin API: give its url")
        return self._url

    def _goes_without_broker(self) -> bool:
        """Whether messages are sent by the admin API."""
        return self._broker is None

    def _pulsar(self) -> Broker:
        self._check_open()
        if self._broker is None:
            raise ValueError("messages are sent to a broker: give its address as broker")
        return self._broker

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the client is closed")


class BlockingConnections(Connections[httpx.Client]):
    """Makes calls, and waits for each of them. Thread-safe."""

    def close(self) -> None:
        """Ends the connections. Later calls raise RuntimeError."""
        self._is_closed = True
        if self._is_own_http:
            self._http.close()
        if self._broker:
            self._broker.close()

    def _make_http(self) -> httpx.Client:
        return httpx.Client()

    def _send(self, make: Callable[[], Scheduled]) -> MessageId:
        message = make()
        if self._goes_without_broker():
            call = rest.schedule(message)
            return rest.scheduled_id(call, self._call(call))
        broker = self._pulsar()
        return self._in_time(
            partial(broker.schedule, message), partial(broker.not_in_time, message.topic, message.request_id)
        )

    def _do(self, make: Callable[[], Command]) -> list[Outcome]:
        command = make()
        with command.time_in_errors():
            if self._goes_over_the_api(command):
                return rest.outcomes(command, self._call(rest.call(command)))
            broker = self._pulsar()
            not_in_time = partial(broker.not_in_time, broker.control_topic, command.request_id)
            return self._in_time(partial(broker.send, command), not_in_time)

    def _in_time(self, begin: Callable[[float], Future[_Result]], not_in_time: Callable[[], Exception]) -> _Result:
        """Returns what a call over the broker results in; raises `not_in_time()` when its time is over.

        Args:
            begin: begins the call; its argument is the deadline by the monotonic clock, seconds.
        """
        deadline = self._deadline()
        result = begin(deadline)
        try:
            return result.result(self._seconds_until(deadline))
        except concurrent.futures.TimeoutError:
            result.cancel()
            raise not_in_time() from None

    def _redrive(self, make: Callable[[], rest.Call]) -> Redriven:
        call = make()
        return rest.redriven(call, self._call(call))

    def _pages(self, listing: paging.Listing[_Listed]) -> Iterator[_Listed]:
        self._api()  # raises here where there is no API, not only when the first item is asked for
        return self._read_pages(listing)

    def _read_pages(self, listing: paging.Listing[_Listed]) -> Iterator[_Listed]:
        n = 0
        call: rest.Call | None = listing.first()
        while call:
            found, call = listing.read(self._call(call), n)
            n += len(found)
            yield from found

    def _call(self, call: rest.Call) -> httpx.Response:
        attempts = rest.Attempts(call, self._timeout_seconds)
        while True:
            retry_after = 0.0
            try:
                response = self._attempt(call, attempts)
                retry_after = rest.retry_after(response)
                rest.raise_if_unavailable(response)
                return response
            except (httpx.RequestError, Unavailable) as error:
                pause = attempts.pause_after(error, retry_after)
            time.sleep(pause)

    def _attempt(self, call: rest.Call, attempts: rest.Attempts) -> httpx.Response:
        request = partial(self._http.request, **self._request(call), timeout=attempts.timeout)
        try:
            return in_thread(request).result(attempts.seconds_left)
        except concurrent.futures.TimeoutError:
            raise _incomplete() from None


class AsyncConnections(Connections[httpx.AsyncClient]):
    """Makes calls that are awaited; for one event loop."""

    async def close(self) -> None:
        """Ends the connections. Later calls raise RuntimeError."""
        self._is_closed = True
        if self._is_own_http:
            await self._http.aclose()
        if self._broker:
            await asyncio.to_thread(self._broker.close)

    def _make_http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient()

    async def _send(self, make: Callable[[], Scheduled]) -> MessageId:
        message = make()
        if self._goes_without_broker():
            call = rest.schedule(message)
            return rest.scheduled_id(call, await self._call(call))
        broker = self._pulsar()
        return await self._in_time(
            partial(broker.schedule, message), partial(broker.not_in_time, message.topic, message.request_id)
        )

    async def _do(self, make: Callable[[], Command]) -> list[Outcome]:
        command = make()
        with command.time_in_errors():
            if self._goes_over_the_api(command):
                return rest.outcomes(command, await self._call(rest.call(command)))
            broker = self._pulsar()
            not_in_time = partial(broker.not_in_time, broker.control_topic, command.request_id)
            return await self._in_time(partial(broker.send, command), not_in_time)

    async def _in_time(
        self, begin: Callable[[float], Future[_Result]], not_in_time: Callable[[], Exception]
    ) -> _Result:
        """As `BlockingConnections._in_time`."""
        deadline = self._deadline()

        async def result() -> _Result:
            return await asyncio.wrap_future(await asyncio.to_thread(begin, deadline))

        try:
            return await asyncio.wait_for(result(), self._seconds_until(deadline))
        except asyncio.TimeoutError:
            raise not_in_time() from None

    async def _redrive(self, make: Callable[[], rest.Call]) -> Redriven:
        call = make()
        return rest.redriven(call, await self._call(call))

    def _pages(self, listing: paging.Listing[_Listed]) -> AsyncIterator[_Listed]:
        self._api()  # raises here where there is no API, not only when the first item is asked for
        return self._read_pages(listing)

    async def _read_pages(self, listing: paging.Listing[_Listed]) -> AsyncIterator[_Listed]:
        n = 0
        call: rest.Call | None = listing.first()
        while call:
            found, call = listing.read(await self._call(call), n)
            n += len(found)
            for one in found:
                yield one

    async def _call(self, call: rest.Call) -> httpx.Response:
        attempts = rest.Attempts(call, self._timeout_seconds)
        while True:
            retry_after = 0.0
            try:
                response = await self._attempt(call, attempts)
                retry_after = rest.retry_after(response)
                rest.raise_if_unavailable(response)
                return response
            except (httpx.RequestError, Unavailable) as error:
                pause = attempts.pause_after(error, retry_after)
            await asyncio.sleep(pause)

    async def _attempt(self, call: rest.Call, attempts: rest.Attempts) -> httpx.Response:
        request = self._http.request(**self._request(call), timeout=attempts.timeout)
        try:
            return await asyncio.wait_for(request, attempts.seconds_left)
        except asyncio.TimeoutError:
            raise _incomplete() from None


def _incomplete() -> httpx.ReadTimeout:
    """Returns the error for an answer that is late as a whole: httpx bounds each step, and it may come byte by byte."""
    return httpx.ReadTimeout("no answer in time, or not all of it")


def _is_http(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)
