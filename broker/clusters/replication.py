"""Finds the cluster in which messages were published: this one, or another from which Pulsar replicated them."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from broker.client import PulsarError
from broker.pulsar_admin.admin_rest import AdminClient, UnreadableEntryError
from broker.pulsar_admin.silent_producers import SilentProducers
from conf.errors import DelayLakeError

_log = logging.getLogger(__name__)

# The property with which a replicating broker sends an entry's position, `ledger:entry`. A consumer sees it, except for
# messages of a batch: the batch as a whole has it.
SOURCE_POSITION = "__MSG_PROP_REPL_SOURCE_POSITION"

_REPLICATED_FROM = "X-Pulsar-replicated-from"

# The name that a broker gives to a producer without one: `cluster-n-n`.
_GIVEN_NAME = re.compile(r"(.+)-\d+-\d+")

_POLICY_SECONDS = 60.0
_RETRY_SECONDS = 1.0


class NotWantedError(DelayLakeError):
    """A request was given up, because nobody wants the answer any more."""


class Origins:
    """Finds the entries of one topic partition that came from another cluster. Not safe in several threads.

    Pulsar's client does not show it; the broker's admin API does, with 1 to 2 ms for each entry. So it is asked only if
    the topic is replicated, which is looked up once a minute, and only about entries of producers that no broker named.

    Args:
        admin: a client for the admin API.
        topic: the topic partition.
        route_topic: the topic as a route names it.
        wait: waits for a number of seconds, and returns whether nobody wants the answer any more.
    """

    def __init__(self, admin: AdminClient, topic: str, route_topic: str, wait: Callable[[float], bool]) -> None:
        self._admin = admin
        self._topic, self._route_topic = topic, route_topic
        self._wait = wait
        self._clusters: frozenset[str] = frozenset()  # between which the topic is replicated; empty: it is not
        self._own: str | None = None  # this cluster; None: unknown
        self._looked_at = -float("inf")
        self._last: tuple[tuple[int, int], str | None] = ((-1, -1), None)
        self._silent_producers = SilentProducers()

    def replicated_from(self, producer: str, ledger_id: int, entry_id: int) -> str | None:
        """Returns the cluster in which an entry was published; None: this one.

        It waits until the broker answers. An entry that the broker no longer has, or can't describe, counts as this
        cluster's: its messages may be delivered in both clusters, but not in none.

        Args:
            producer: the name of the entry's producer.
            ledger_id: the entry's ledger.
            entry_id: the entry.

        Raises:
            NotWantedError: nobody wants the answer any more.
        """
        while True:
            try:
                self._look_up_policy()
                if not self._clusters:
                    return None
                given = _GIVEN_NAME.fullmatch(producer)
                if given and self._own and given[1] in self._clusters:
                    return None if given[1] == self._own else given[1]
                return self._ask(producer, ledger_id, entry_id)
            except PulsarError as error:
                _log.warning(
                    "%s: where %d:%d was published is not known yet: %s", self._topic, ledger_id, entry_id, error
                )
            if self._wait(_RETRY_SECONDS):
                raise NotWantedError(f"{self._topic}: where {ledger_id}:{entry_id} was published is not asked any more")

    def _ask(self, producer: str, ledger_id: int, entry_id: int) -> str | None:
        if self._last[0] != (ledger_id, entry_id):
            self._last = (ledger_id, entry_id), self._origin(producer, ledger_id, entry_id)
        return self._last[1]

    def _origin(self, producer: str, ledger_id: int, entry_id: int) -> str | None:
        if self._silent_producers.is_silent(producer):
            return None
        try:
            answer = self._admin.entry(self._topic, ledger_id, entry_id)
        except UnreadableEntryError as error:
            _log.warning("%s: taken as its own, of producer %s", error, producer)
            self._silent_producers.add(producer)
            return None
        self._silent_producers.remove(producer)
        if answer is None:
            _log.warning("%s: the broker has no entry %d:%d: taken as its own", self._topic, ledger_id, entry_id)
            return None
        return answer[0].get(_REPLICATED_FROM)

    def _look_up_policy(self) -> None:
        if time.monotonic() - self._looked_at < _POLICY_SECONDS:
            return
        clusters = self._admin.replication_clusters(self._route_topic)
        found = frozenset(clusters) if len(clusters) > 1 else frozenset()
        if found and self._own is None:
            try:
                self._own = self._admin.broker_configuration().get("clusterName")
            except PulsarError as error:
                _log.warning(
                    "every entry of %s is asked for, as the name of this cluster is unknown: %s", self._topic, error
                )
        if found != self._clusters:
            _log.info("%s is replicated between %s: only what was published here is taken", self._topic, sorted(found))
        self._clusters = found
        self._looked_at = time.monotonic()
