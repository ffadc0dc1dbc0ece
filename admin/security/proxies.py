"""Finds the address and scheme of a caller behind a trusted proxy."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustedProxies:
    """Middleware: sets the client of a call from a trusted proxy to the last hop that is not a trusted proxy.

    Only the part of `X-Forwarded-For` that trusted proxies have added counts: callers can write anything before it.
    """

    def __init__(self, app: ASGIApp, proxies: Iterable[Network]) -> None:
        self._app = app
        self._proxies = tuple(proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._proxies and scope.get("client"):
            address, port = scope["client"]
            if self._is_trusted(address):
                headers = Headers(scope=scope)
                hops = ",".join(headers.getlist("x-forwarded-for")).split(",")
                scope = {**scope, "client": (self._client(address, hops), port)}
                if (scheme := headers.get("x-forwarded-proto", "").strip().lower()) in ("http", "https"):
                    scope["scheme"] = scheme
        await self._app(scope, receive, send)

    def _client(self, proxy: str, hops: list[str]) -> str:
        """Returns the last hop that is not a trusted proxy, or else the farthest trusted proxy."""
        client = proxy
        for hop in reversed(hops):
            address = _address(hop.strip())
            if address is None:
                return client
            client = address
            if not self._is_trusted(address):
                return client
        return client

    def _is_trusted(self, text: str) -> bool:
        address = _address(text)
        return address is not None and any(ipaddress.ip_address(address) in network for network in self._proxies)


def _address(text: str) -> str | None:
    """Returns an IP address, which may have a port, in canonical spelling; None: the text is not an address."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return str(getattr(address, "ipv4_mapped", None) or address)
