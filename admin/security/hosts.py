"""The host names by which the API may be called, which prevents DNS rebinding.

Any page of the web can make its own host name point to 127.0.0.1, and then has the same origin as a server there. Its
requests still have that name in the header `Host`.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from admin.errors import error_response
from admin.security.authentication import RateLimit, wildcard_regex
from admin.security.refusals import Refusal, Refusals
from conf.settings import Settings

MISDIRECTED = 421
TOO_MANY = 429
TOO_MANY_REASON = "too many calls: wait, and call again"

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_SHOWN = 200  # characters of a name that errors show
_MAX_LOGGED = 100  # names that are logged: callers may invent any number

_log = logging.getLogger(__name__)


def host_check(settings: Settings) -> Callable[[str, str | None], bool] | None:
    """Makes the check whether a call under a host name may be served.

    Allowed are the names of `api.allowed_hosts`, `api.host`, loopback names and addresses, and the address at which the
    call came in. With authentication, and without that setting, every name is: a page under another name has no token.

    Returns:
        a function of the name and the address at which the call came in (None: unknown); None: every name is allowed.
    """
    if settings.auth.enabled and not settings.api.allowed_hosts:
        return None
    return host_names_check((settings.api.host, *settings.api.allowed_hosts))


def host_names_check(own: Iterable[str]) -> Callable[[str, str | None], bool]:
    """Makes the check of `host_check` for loopback names and given ones, in which `*` stands for any characters."""
    names = wildcard_regex([name.lower() for name in ("localhost", *own)])

    def is_allowed(name: str, reached_at: str | None) -> bool:
        if names.fullmatch(name):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or str(address) == reached_at

    return is_allowed


class AllowedHosts:
    """Middleware: answers 421 to calls under a name that is not the API's, whatever their path."""

    def __init__(
        self,
        app: ASGIApp,
        is_allowed: Callable[[str, str | None], bool] | None,
        refusals: Refusals,
        rate_limit: RateLimit | None,
    ) -> None:
        self._app = app
        self._is_allowed = is_allowed
        self._refusals = refusals
        self._rate_limit = rate_limit
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed is None:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("host")
        name = host_name(given[0]) if len(given) == 1 else ""
        reached_at = scope["server"][0] if scope.get("server") else None
        if self._is_allowed(name, reached_at):
            await self._app(scope, receive, send)
            return
        address = scope["client"][0] if scope.get("client") else "unknown"
        if self._rate_limit and (wait := self._rate_limit.take("address", address)):
            await error_response(TOO_MANY, TOO_MANY_REASON, headers={"Retry-After": str(wait)})(scope, receive, send)
            return
        reason = f"not served under the name {name[:_SHOWN]!r}: add it to api.allowed_hosts if it is this API's"
        self._record(scope, address, name, reason)
        await error_response(MISDIRECTED, reason)(scope, receive, send)

    def _record(self, scope: Scope, address: str, name: str, reason: str) -> None:
        if name not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(name)
            _log.warning("a call was refused: %s", reason)
        if scope["method"] not in _READS:
            self._refusals.add(Refusal(None, address, scope["method"], None, None, None, MISDIRECTED, reason))


def host_name(header: str) -> str:
    """Returns the name in a header `Host`, in lower case and without its port: `::1` for `[::1]:8081`."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")
