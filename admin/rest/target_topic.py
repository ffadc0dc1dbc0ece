"""The topic and the subscriptions that a call names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Request
from fastapi.dependencies.models import Dependant

from admin.control.async_client import AsyncControlClient
from admin.errors import AdminError
from admin.security.policy import topic_name
from conf.settings import Route, Settings
from tracker.commands.decode import resolve_topic
from tracker.subscriptions import ALSO_LATER
from warehouse.queries.listing import State
from warehouse.queries.unsealed_messages import Unacknowledged, UnacknowledgedReader

# Pulsar's clients send them with any call.
_ALWAYS_TAKEN = frozenset({"authoritative", "token"})

PARTITIONED = "the topic is partitioned: name a partition"

_READS = frozenset({"GET", "HEAD"})

# What is wrong with the parameters of these calls is 412, as PIP-423 has it; elsewhere it is 400.
_PRECONDITIONS = ("/cancelDelayedMessage", "/acknowledgeMessage")


@dataclass(frozen=True)
class Target:
    """The topic that a path names."""

    name: str  # full name, with the suffix of a partition if the path has one
    route: Route
    partition: int  # -1: the path names no partition

    def read_come_in(self, reader: UnacknowledgedReader, state: State) -> Unacknowledged:
        """Reads what has only just been sent, as `UnacknowledgedReader.read`."""
        return reader.read(self.route.source, self.partition if self.partition >= 0 else None, state)

    def check_subscriptions(self, names: Sequence[str]) -> None:
        """Raises AdminError (404) if the topic does not have a subscription of each name; `*` is allowed."""
        known = {subscription.name for subscription in self.route.subscriptions}
        if unknown := [name for name in names if name not in known and name != ALSO_LATER]:
            raise AdminError(404, f"the topic {self.name} has no such subscription: {unknown[0][:300]!r}")

    def check_partition(self, control: AsyncControlClient) -> None:
        """Raises AdminError (404) if the broker says that the topic has no such partition; blocks for some ms."""
        names = control.partitions(self.route.source)
        if names is not None and self.name not in names:
            raise AdminError(404, f"no such topic: {self.route.source} has no partition {self.partition}")

    def refuse_whole(self, control: AsyncControlClient) -> None:
        """Raises AdminError (405) if a partition has to be named, and the call names none; blocks for some ms."""
        if self.partition < 0 and control.partitions(self.route.source) not in (None, [self.route.source]):
            raise AdminError(405, PARTITIONED)


def target(
    request: Request,
    tenant: Annotated[str, Path(examples=["public"])],
    namespace: Annotated[str, Path(examples=["default"])],
    topic: Annotated[str, Path(description="URL-encoded; also a partition's.", examples=["orders"])],
) -> Target:
    """A dependency that returns the topic that the path names.

    Raises:
        AdminError: 404, it is neither the source topic of a route nor a partition of one, or the call changes something
            of a partition that there is not; 400 or 412, the query has a parameter that the call does not have: a
            misspelt `subscriptionNames` would be for all subscriptions.
    """
    settings: Settings = request.app.state.settings
    name = topic_name(tenant, namespace, topic)
    source, partition = resolve_topic(name, {route.source for route in settings.routes})
    route = settings.route(source) if source else None
    if route is None:
        raise AdminError(404, f"no such topic: {name[:300]!r}")
    if unknown := request.query_params.keys() - _parameters(request.scope["route"].dependant) - _ALWAYS_TAKEN:
        code = 412 if request.url.path.endswith(_PRECONDITIONS) else 400
        raise AdminError(code, f"the call has no parameter {min(unknown)[:80]!r}")
    found = Target(name, route, partition)
    if partition >= 0 and request.method not in _READS:
        found.check_partition(request.app.state.control)
    return found


TargetTopic = Annotated[Target, Depends(target)]


def _parameters(dependant: Dependant) -> set[str]:
    """Returns the names of the query's parameters of a route and of what it depends on."""
    names = {parameter.alias for parameter in dependant.query_params}
    return names.union(*map(_parameters, dependant.dependencies))
