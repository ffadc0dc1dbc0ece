"""Connections of the admin API: none is held open by a client that sends nothing, or takes nothing.

uvicorn limits the time between two requests of a connection only. Here a head, a body and an answer have a time, too.
With as many connections as there may be, a new one takes the place of the one that has waited longest for its client.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from functools import partial
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # from a connection, or the last answer, to the end of the next request's head
BODY_SECONDS = 30.0  # from the end of a head to the end of the body
TAKE_SECONDS = 30.0  # for the client to take a part of an answer, so that more can be sent
HANDSHAKE_SECONDS = 5.0  # of TLS

_LOOK_SECONDS = 1.0


class TimedProtocol(H11Protocol):
    """A connection that is closed when a client takes too long.

    Attributes:
        max_connections: the most connections of the process.
    """

    max_connections: ClassVar[int] = 1_000

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._head_at = self._idle_since  # when the last request's head was complete
        self._stuck_since: float | None = None  # since when the client has taken nothing
        self._make_room()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._head_at = self.loop.time()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._stuck_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck_since = None
        super().resume_writing()

    @property
    def is_idle(self) -> bool:
        """Whether no request is at work: none has come, or its head is not complete."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def waits_since(self) -> float | None:
        """Since when it waits for a head or a body of its client, seconds of the loop's clock; None: it does not."""
        if self.is_idle:
            return self._idle_since
        return self._head_at if self.cycle.more_body else None

    def _make_room(self) -> None:
        if len(self.connections) <= self.max_connections:
            return
        others = [one for one in self.connections if isinstance(one, TimedProtocol) and one is not self]
        waiting = [(since, i) for i, one in enumerate(others) if (since := _waits_since(one)) is not None]
        (others[min(waiting)[1]] if waiting else self).transport.abort()

    def _look(self) -> None:
        self._timer = self.loop.call_later(_LOOK_SECONDS, self._look)
        now = self.loop.time()
        is_closing = self.transport.is_closing()
        if self.is_idle and not is_closing:
            is_late = now - self._idle_since > HEAD_SECONDS
        elif not is_closing and self.cycle.more_body:
            is_late = now - self._head_at > BODY_SECONDS
        else:
            is_late = False
        if is_closing and self._stuck_since is None:
            self._stuck_since = now  # what is left of the answer waits for the client
        if is_late or (self._stuck_since is not None and now - self._stuck_since > TAKE_SECONDS):
            self._timer.cancel()
            self.transport.abort()


def _waits_since(one: TimedProtocol) -> float | None:
    return None if one.transport.is_closing() else one.waits_since


class TimedServer(uvicorn.Server):
    """A server that does not wait for TLS handshakes for long."""

    async def startup(self, sockets: Any = None) -> None:
        if self.config.is_ssl:
            loop = asyncio.get_running_loop()
            create = partial(loop.create_server, ssl_handshake_timeout=HANDSHAKE_SECONDS)
            loop.create_server = create  # type: ignore[method-assign]
        await super().startup(sockets)


def allow_connections(most: int) -> type[TimedProtocol]:
    """Lets this process have as many files open as the system allows.

    Args:
        most: the most connections that it is to have; fewer where the system does not allow twice as many files.

    Returns:
        the class of its connections.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    TimedProtocol.max_connections = most if soft == resource.RLIM_INFINITY else min(most, soft // 2)
    return TimedProtocol
