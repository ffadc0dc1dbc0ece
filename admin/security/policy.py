"""The policy of each route: what its caller must be allowed to do. Routes declare it by `requires`, `open_to_all`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from fastapi.security import HTTPBearer

from admin.errors import AdminError
from admin.security.authentication import BEARER, Authenticator, RateLimit, Roles
from admin.security.hosts import TOO_MANY, TOO_MANY_REASON
from admin.security.refusals import Refusal, Refusals
from admin.security.tokens import TokenError
from conf.api_settings import Operation
from conf.errors import DelayLakeError
from conf.settings import Route, Settings

# The role of callers without authentication; commands have it in `issued_by`.
ANONYMOUS = "anonymous"

# The cookie in which a browser stores its token: only pages of the same site send it, and no script can read it.
TOKEN_COOKIE = "delaylake_token"  # noqa: S105

# Routes that the framework makes, without dependencies.
OPEN_PATHS = frozenset({"/openapi.json"})

# Adds tokens to the API's description; the policy itself reads them.
_BEARER = HTTPBearer(bearerFormat="JWT", auto_error=False, description="A token of Pulsar's, where they are required.")


class PolicyError(DelayLakeError):
    """A route declares no policy."""


@dataclass(frozen=True)
class Reader:
    """The caller of a route that is not for a single topic."""

    role: str
    routes: Sequence[Route]  # the routes of topics on which the caller may do the operation
    sees_all: bool  # whether the caller may do it on all topics
    is_admin: bool  # whether the caller may do ADMIN on all topics


class Policy:
    """Lets calls pass, or refuses them: 401 without a valid token, 403 if the role may not do it, 429 if too many.

    Raises:
        TokenKeyError: the key in the settings can't be used.
    """

    def __init__(self, settings: Settings, refusals: Refusals) -> None:
        auth = settings.auth
        self._authenticator = Authenticator(auth) if auth.enabled else None
        self._roles = Roles(auth.roles)
        self.rate_limit = RateLimit(settings.api.rate_limit) if settings.api.rate_limit else None
        self._refusals = refusals
        self._routes = settings.routes

    def check(self, request: Request, operation: Operation) -> str:
        """Checks that the caller may do an operation on the topic that the path names; returns its role.

        Raises:
            HTTPException: the call is refused.
        """
        role = None
        path = request.path_params
        topic = topic_name(path["tenant"], path["namespace"], path["topic"]) if "topic" in path else None
        try:
            role, is_by_browser = self._caller(request)
            if is_by_browser and operation is not Operation.READ and is_from_another_site(request):
                raise HTTPException(403, "without a token in the header no page of another site may call")
            if self._authenticator and not self._roles.allow(role, operation, topic):
                raise HTTPException(403, f"the role {role} may not {operation} on {topic or 'all topics'}")
        except HTTPException as refusal:
            self._record(request, refusal, operation, role, topic)
            raise
        request.state.granted = operation, role
        return role

    def check_whole_topic(self, request: Request, topic: str) -> None:
        """Checks that the caller may do what `check` let pass on a whole topic, and not on one of its partitions only.

        Args:
            request: the call.
            topic: full name of the source topic, without a partition.

        Raises:
            HTTPException: the call is refused.
        """
        operation, role = request.state.granted
        if self._authenticator and not self._roles.allow(role, operation, topic):
            why = f"the role {role} may {operation} on a partition alone: this is for all of {topic}"
            refusal = HTTPException(403, why)
            self._record(request, refusal, operation, role, topic)
            raise refusal

    def _record(
        self, request: Request, refusal: HTTPException, operation: Operation, role: str | None, topic: str | None
    ) -> None:
        # Refused reads are not recorded as they change nothing, and not calls beyond the rate limit, to save work.
        if operation is not Operation.READ and refusal.status_code != TOO_MANY:
            call = (role, _address(request), request.method, request.url.path, topic, operation)
            self._refusals.add(Refusal(*call, refusal.status_code, refusal.detail))

    def check_some(self, request: Request, operation: Operation) -> Reader:
        """Checks that there is a topic on which the caller may do an operation; returns the caller.

        Raises:
            HTTPException: the call is refused.
        """
        role, _ = self._caller(request)
        if self._authenticator is None:
            return Reader(role, self._routes, sees_all=True, is_admin=True)
        routes = [route for route in self._routes if self._roles.allow(role, operation, route.source)]
        sees_all = self._roles.allow(role, operation, None)
        if not (routes or sees_all):
            raise HTTPException(403, f"the role {role} may not {operation} on any topic")
        return Reader(role, routes, sees_all, self._roles.allow(role, Operation.ADMIN, None))

    def login(self, request: Request, token: str) -> str:
        """Returns the role of a token that a user logs in with.

        Raises:
            AdminError: the token is not accepted, or authentication is off.
            HTTPException: there were too many calls.
        """
        try:
            self._count("address", _address(request))
            if is_from_another_site(request):
                raise AdminError(403, "no page of another site may log you in")
            if self._authenticator is None:
                raise AdminError(400, "authentication is off: no token is needed")
            return self._authenticator.role(None, token)
        except TokenError as error:
            raise AdminError(401, str(error)) from error

    def _caller(self, request: Request) -> tuple[str, bool]:
        """Returns the caller's role, and whether a browser may have sent the call on its own, for any page.

        That is so of a call without authentication, and of one whose role is that of the cookie's token: a browser adds
        the cookie. A token in the header or the query the caller has to know.
        """
        if self._authenticator is None:
            self._count("address", _address(request))
            return ANONYMOUS, True
        header, cookie = request.headers.get("authorization"), request.cookies.get(TOKEN_COOKIE)
        is_by_cookie = header is None and cookie is not None
        try:
            if is_by_cookie:
                role = self._authenticator.role(f"{BEARER}{cookie}", None)
            else:
                role = self._authenticator.role(header, request.query_params.get("token"))
        except TokenError as error:
            self._count("address", _address(request))
            raise HTTPException(401, str(error), {"WWW-Authenticate": "Bearer"}) from None
        self._count("role", role)
        return role, is_by_cookie

    def _count(self, kind: str, caller: str) -> None:
        if self.rate_limit and (wait := self.rate_limit.take(kind, caller)):
            raise HTTPException(TOO_MANY, TOO_MANY_REASON, {"Retry-After": str(wait)})


class requires:
    """A dependency that returns the caller's role, if it may do the operation on the topic that the path names.

    `role: Annotated[str, Depends(requires(Operation.SKIP))]`
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    async def __call__(self, request: Request, _: Annotated[object, Depends(_BEARER)]) -> str:
        policy: Policy = request.app.state.policy
        return policy.check(request, self.operation)


class requires_some:
    """A dependency that returns the caller, if it may do the operation on some topic.

    `caller: Annotated[Reader, Depends(requires_some(Operation.READ))]`
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    async def __call__(self, request: Request, _: Annotated[object, Depends(_BEARER)]) -> Reader:
        policy: Policy = request.app.state.policy
        return policy.check_some(request, self.operation)


async def open_to_all() -> None:
    """A dependency that lets everyone pass: `dependencies=[Depends(open_to_all)]`."""


def topic_name(tenant: str, namespace: str, topic: str) -> str:
    """Returns the full name of the topic that a path names, for the policy and for the operation."""
    return f"persistent://{tenant}/{namespace}/{topic}"


def is_from_another_site(request: Request) -> bool:
    """Whether a page of another origin makes the call, by the browser's headers: any page can reach 127.0.0.1.

    Another port of the same host is another origin. `Sec-Fetch-Site` decides where the browser sends it, as no page can
    set it; else `Origin`.
    """
    if (site := request.headers.get("sec-fetch-site")) is not None:
        return site not in ("same-origin", "none")
    origin = request.headers.get("origin")
    if origin is None:
        return False
    scheme, _, host = origin.partition("://")
    # Behind a proxy that ends TLS, and is not trusted, the page is https and the call http.
    is_downgraded = scheme == "http" and request.url.scheme == "https"
    return host != request.headers.get("host") or is_downgraded


def _address(request: Request) -> str:
    return request.client.host if request.client else "unknown"


def policy_of(route: RouteContext) -> Operation | None:
    """Returns the operation that a route requires; None: it is open to all.

    Raises:
        PolicyError: the route declares no policy.
    """
    if isinstance(route.original_route, APIRoute):
        calls = _calls(route.dependant)
        if open_to_all in calls:
            return None
        for call in calls:
            if isinstance(call, (requires, requires_some)):
                return call.operation
    elif route.path in OPEN_PATHS:
        return None
    raise PolicyError(f"the route {route.path} declares no policy")


def check_policies(app: FastAPI) -> None:
    """Checks that each route of an app declares its policy.

    Raises:
        PolicyError: a route declares no policy.
    """
    for route in iter_route_contexts(app.routes):
        policy_of(route)


def _calls(dependant: Dependant) -> list[object]:
    return [call for dependency in dependant.dependencies for call in (dependency.call, *_calls(dependency))]
