"""Authentication and authorization of callers, rate limits, and checks of where the API may be served."""

from __future__ import annotations

import ipaddress
import logging
import math
import re
import ssl
import time
from collections.abc import Sequence

from limits import parse
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from admin.security.refusals import network_of
from admin.security.tokens import TokenError, TokenVerifier
from conf.api_settings import ApiSettings, AuthSettings, Operation, Role
from conf.errors import DelayLakeError
from conf.partitions import without_partition

BEARER = "Bearer "

# Operations that another one includes: a role that may SKIP may ACKNOWLEDGE, too.
_INCLUDED_IN = {Operation.ACKNOWLEDGE: Operation.SKIP}

# A rule's pattern for partitions: a topic's, and `-partition-` with a number, in which there may be `*`.
_PARTITION_PATTERN = re.compile(r"(.*)(-partition-[0-9*]+)", re.DOTALL)

_MAX_CALLERS = 50_000

_TOKEN = re.compile(r"([?&]token=)[^&]*")


class SecurityError(DelayLakeError):
    """The API can't be served with these settings. The message is one line."""


class Roles:
    """Decides what each role may do.

    Args:
        roles: the rules in the settings. A role that matches several rules may do what any of them allows.
    """

    def __init__(self, roles: Sequence[Role]) -> None:
        self._rules = [
            (wildcard_regex([role.role]), frozenset(role.operations), list(map(_TopicPattern, role.topics)))
            for role in roles
        ]

    def allow(self, role: str, operation: Operation, topic: str | None) -> bool:
        """Whether a role may do an operation on a topic.

        As at the broker, a rule for a topic is for its partitions, too, and a partition's name is not looked at: a rule
        for `orders-*` is for neither `orders` nor its partition `orders-partition-0`.

        Args:
            topic: full name of the topic; None: the operation is not on a single topic, and needs a rule for all (`*`).
        """
        return any(
            roles.fullmatch(role)
            and not operations.isdisjoint((operation, _INCLUDED_IN.get(operation, operation), Operation.ADMIN))
            and any(pattern.is_for_all if topic is None else pattern.matches(topic) for pattern in topics)
            for roles, operations, topics in self._rules
        )


class _TopicPattern:
    """The pattern of a rule's topics. One that ends in `-partition-N` is for partitions, others are for topics."""

    def __init__(self, pattern: str) -> None:
        self.is_for_all = pattern == "*"
        of_partition = _PARTITION_PATTERN.fullmatch(pattern)
        self._topic = wildcard_regex([of_partition[1] if of_partition else pattern])
        self._partition = wildcard_regex([of_partition[2]]) if of_partition else None

    def matches(self, topic: str) -> bool:
        """Whether a topic's full name, which may be a partition's, matches."""
        base = without_partition(topic)
        partition = topic[len(base) :]
        return bool(self._topic.fullmatch(base)) and (
            self._partition is None or (bool(partition) and bool(self._partition.fullmatch(partition)))
        )


class Authenticator:
    """Finds out a caller's role from its token.

    Raises:
        TokenKeyError: the key in the settings can't be used.
    """

    def __init__(self, settings: AuthSettings) -> None:
        self._verifier = TokenVerifier.from_settings(settings)

    def role(self, authorization: str | None, token: str | None) -> str:
        """Returns the role of a request's caller.

        Args:
            authorization: the header `Authorization`.
            token: the query parameter `token`, which counts only without that header, as at the broker.

        Raises:
            TokenError: there is no token, or it is not accepted.
        """
        if authorization is None:
            if token is None:
                raise TokenError("a token is needed (Authorization: Bearer ...)")
            authorization = token if token.startswith(BEARER) else BEARER + token
        if not authorization.startswith(BEARER):
            raise TokenError("the Authorization header must be: Bearer, a space, a token")
        return self._verifier.role(authorization.removeprefix(BEARER))


class RateLimit:
    """Limits the rate of each caller's calls. Calls are counted in this process only, of IPv6 by network.

    With more than _MAX_CALLERS callers in a window all counts begin anew, so that they can't fill the memory.

    Args:
        limit: a limit such as `100/second`.
    """

    def __init__(self, limit: str) -> None:
        self._limit = parse(limit)
        self._storage = MemoryStorage()
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)

    def take(self, kind: str, caller: str) -> int:
        """Counts a call.

        Args:
            kind: `role` or `address`.
            caller: the caller's role or address.

        Returns:
            0: the call is within the limit; else the seconds that the caller has to wait.
        """
        caller = network_of(caller) if kind == "address" else caller
        if len(self._storage.storage) > _MAX_CALLERS:
            self._storage.reset()
        if self._limiter.hit(self._limit, kind, caller):
            return 0
        reset_time = self._limiter.get_window_stats(self._limit, kind, caller).reset_time
        return max(1, math.ceil(reset_time - time.time()))


def check_address(address: str, auth: AuthSettings) -> None:
    """Refuses to serve other machines without authentication.

    Raises:
        SecurityError: the IP address is not a loopback address.
    """
    if not auth.enabled and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise SecurityError(f"{address} can be reached from other machines: set auth.enabled, or serve on 127.0.0.1")


def check_certificate(settings: ApiSettings) -> None:
    """Checks that the certificate, if one is set, and its key can be used.

    Raises:
        SecurityError: they can't be used.
    """
    certificate, key = settings.tls_certificate_file, settings.tls_key_file
    if certificate is None:
        return
    try:
        # An empty password, so that OpenSSL does not ask for one on the terminal.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password=lambda: b"")
    except OSError as error:
        raise SecurityError(
            f"can't serve https with api.tls_certificate_file {certificate} and api.tls_key_file {key}: "
            f"{error.strerror or error}"
        ) from error


def hide_tokens(record: logging.LogRecord) -> bool:
    """A filter for the server's access log that replaces tokens in queries by `...`; it lets every record pass."""
    if isinstance(record.args, tuple):
        record.args = tuple(_TOKEN.sub(r"\1...", value) if isinstance(value, str) else value for value in record.args)
    return True


def wildcard_regex(patterns: Sequence[str]) -> re.Pattern[str]:
    """Returns a regular expression for texts that match one of the patterns, in which `*` stands for any characters."""
    return re.compile("|".join(re.escape(pattern).replace(r"\*", ".*") for pattern in patterns), re.DOTALL)
