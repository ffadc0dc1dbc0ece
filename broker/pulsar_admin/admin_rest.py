"""A client for the part of Pulsar's admin REST API that delaylake uses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from broker.client import NoAnswerError, PulsarError, SchemaRefusedError
from broker.pulsar_admin.admin_connection import AdminConnection
from broker.pulsar_admin.answers import BrokerEntry, TopicLedgers, broker_entry, entry_ranges, millis, topic_ledgers
from conf.settings import PulsarSettings

if TYPE_CHECKING:
    import httpx

_INDEX_HEADER = "X-Pulsar-Broker-Entry-METADATA-index"

_TIMEOUT_SECONDS = 10.0
_ENTRY_SECONDS = 2.0  # time-out of a request about an entry; milliseconds are usual
_CONTENT_SECONDS = 5.0  # time-out of a request for an entry with its content
_SCHEMA_REFUSED = (409, 422)  # the answers to a schema that a topic does not take, or that is none
_AGAIN_SECONDS = 1.0  # before a request about an entry is repeated


class UnreadableEntryError(NoAnswerError):
    """The broker has an entry, but returns neither its metadata nor its content.

    That happens if its properties exceed the 16 KiB that HTTP headers may have (the broker answers 500), and with some
    brokers if it is encrypted and compressed (they decompress the encrypted bytes, and never answer).
    """


class AdminClient:
    """A client for Pulsar's admin REST API. One connection pool; safe in several threads.

    Topics are full names (`persistent://tenant/namespace/topic`). Every method raises PulsarError if the broker can't
    be reached or refuses the request, unless it says otherwise.
    """

    def __init__(self, settings: PulsarSettings, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        self._admin = AdminConnection(settings, timeout_seconds)
        self.url = self._admin.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._admin.close()

    def health(self) -> bool:
        """Whether the broker can produce and read a message; False also if it does not answer."""
        try:
            return self._admin.request("GET", "brokers/health").status_code == 200
        except PulsarError:
            return False

    def namespaces(self, tenant: str) -> list[str]:
        """Returns the tenant's namespaces as `tenant/namespace`."""
        namespaces: list[str] = self._admin.json("GET", f"namespaces/{tenant}")
        return namespaces

    def broker_configuration(self) -> dict[str, str]:
        """Returns the running broker's configuration, all values as text."""
        configuration: dict[str, str] = self._admin.json("GET", "brokers/configuration/runtime")
        return configuration

    def deduplication_enabled(self, namespace: str) -> bool:
        """Whether the broker drops repeated sends in a namespace: by the namespace's policy, else by its default."""
        policy = self._admin.request("GET", f"namespaces/{namespace}/deduplication")
        if policy.status_code == 200 and policy.content:
            return bool(policy.json())
        if policy.status_code not in (200, 204, 404):
            raise self._admin.refused(policy)
        return self.broker_configuration().get("brokerDeduplicationEnabled") == "true"

    def has_retention(self, namespace: str) -> bool:
        """Whether a namespace retains acknowledged messages: by its policy, else by the broker's default."""
        policy = self._admin.request("GET", f"namespaces/{namespace}/retention")
        if policy.status_code not in (200, 204, 404):
            raise self._admin.refused(policy)
        if policy.status_code == 200 and policy.content and (found := policy.json()):
            return bool(found["retentionTimeInMinutes"] and found["retentionSizeInMB"])
        configuration = self.broker_configuration()
        names = ("defaultRetentionTimeInMinutes", "defaultRetentionSizeInMB")
        return all(int(configuration.get(name) or 0) for name in names)

    def partitions(self, topic: str) -> int | None:
        """Returns the number of a topic's partitions: 0 if it is not partitioned, None if there is no such topic."""
        response = self._admin.request("GET", f"{_path(topic)}/partitions")
        if response.status_code == 404:
            return None
        return int(self._admin.body(response)["partitions"])

    def create_partitioned_topic(self, topic: str, partitions: int) -> None:
        """Creates a partitioned topic.

        Raises:
            PulsarError: also if the topic exists.
        """
        self._admin.change("PUT", f"{_path(topic)}/partitions", partitions)

    def backlog(self, topic: str, subscription: str) -> int | None:
        """Returns the number of messages that a subscription has not acknowledged, in all partitions of a topic.

        Returns:
            None: there is no such topic or subscription.
        """
        kind = "partitioned-stats?perPartition=false" if self.partitions(topic) else "stats"
        response = self._admin.request("GET", f"{_path(topic)}/{kind}")
        if response.status_code == 404:
            return None
        found = self._admin.body(response)["subscriptions"].get(subscription)
        return None if found is None else int(found["msgBacklog"])

    def message_index(self, topic: str, ledger_id: int, entry_id: int) -> int | None:
        """Returns an entry's index; None: the broker keeps no indexes (it has no AppendIndexMetadataInterceptor).

        A topic's first message has index 0. The index of a batch is that of its **last** message: a batch of n messages
        has the indexes `message_index - n + 1` to `message_index`. Each partition of a topic has indexes of its own:
        name the partition (`...-partition-0`).
        """
        response = self._admin.request("GET", _entry_path(topic, ledger_id, entry_id), timeout=_ENTRY_SECONDS)
        if response.status_code != 200:
            raise self._admin.refused(response)
        index = response.headers.get(_INDEX_HEADER)
        return None if index is None else int(index)

    def entry_of_index(self, topic: str, index: int) -> tuple[int, int] | None:
        """Returns the entry (ledger, entry) of a message by its index; (-1, -1): it is trimmed.

        Returns:
            None: no message has had this index yet.

        Raises:
            PulsarError: also if the broker keeps no indexes, or can't look them up (Pulsar before 4.1).
        """
        response = self._admin.request("GET", f"{_path(topic)}/getMessageIdByIndex?index={index}")
        if response.status_code == 404:
            return None
        found = self._admin.body(response)
        return int(found["ledgerId"]), int(found["entryId"])

    def entry(self, topic: str, ledger_id: int, entry_id: int) -> tuple[Mapping[str, str], bytes] | None:
        """Returns the HTTP headers that describe an entry of a topic or partition, and its content, decompressed.

        The content of a batch is the sequence of its messages, each with its metadata.

        Returns:
            (headers, content); None: the broker does not have the entry.

        Raises:
            UnreadableEntryError: the broker has the entry, but does not return it, after two requests.
        """
        response = self._of_entry("GET", topic, ledger_id, entry_id, _CONTENT_SECONDS)
        return None if response is None else (response.headers, response.content)

    def schema(self, topic: str, version: int | None = None) -> tuple[str, str, dict[str, str]] | None:
        """Returns the type, definition and properties of a topic's schema; None: there is none.

        Args:
            topic: full name of the topic.
            version: None: the newest.
        """
        path = f"{_schemas_path(topic)}/schema"
        response = self._admin.request("GET", path if version is None else f"{path}/{version}")
        if response.status_code == 404:
            return None
        found = self._admin.body(response)
        return found["type"], found["data"], found.get("properties") or {}

    def register_schema(self, topic: str, kind: str, definition: str, properties: dict[str, str]) -> int:
        """Registers a schema with a topic; returns its version, an existing one if the topic has the schema already.

        Raises:
            SchemaRefusedError: the topic does not take it.
        """
        content = {"type": kind, "schema": definition, "properties": properties}
        response = self._admin.request("POST", f"{_schemas_path(topic)}/schema", json=content)
        if response.status_code in _SCHEMA_REFUSED:
            raise SchemaRefusedError(str(self._admin.refused(response)))
        return int(self._admin.body(response)["version"]["version"])

    def max_message_bytes(self, topic: str) -> int | None:
        """Returns the largest message that a topic's own policy lets it take; None: it has no such policy."""
        response = self._admin.request("GET", f"{_path(topic)}/maxMessageSize")
        # A broker without policies of topics answers 405.
        found = response.json() if response.status_code == 200 and response.content else None
        return found if isinstance(found, int) and found > 0 else None

    def internal_stats(self, topic: str) -> TopicLedgers | None:
        """Returns a topic partition's ledgers and cursors; None: there is no such topic."""
        response = self._admin.request("GET", f"{_path(topic)}/internalStats")
        if response.status_code == 404:
            return None
        return topic_ledgers(self._admin.body(response))

    def entry_published_at(self, topic: str, time: int) -> tuple[int, int] | None:
        """Returns (ledger, entry) of the first entry published at a time, ms since the epoch, or later; None: unknown.

        It is the topic's last entry where all were published before.
        """
        response = self._admin.request("GET", f"{_path(topic)}/messageid/{time}")
        found = response.json() if response.status_code == 200 else {}
        ledger, entry = found.get("ledgerId"), found.get("entryId")
        return (ledger, entry) if isinstance(ledger, int) and isinstance(entry, int) else None

    def made_at(self, topic: str) -> int | None:
        """Returns when a topic partition was created, ms since the epoch; None: unknown."""
        response = self._admin.request("GET", f"{_path(topic)}/internal-info")
        return millis(response.json().get("creationDate") or "") if response.status_code == 200 else None

    def reset_to_entry(self, topic: str, subscription: str, ledger_id: int, entry_id: int) -> None:
        """Sets a subscription of a topic partition to go on after an entry. The broker sends that once more.

        Raises:
            PulsarError: also if there is no such subscription.
        """
        body = {"ledgerId": ledger_id, "entryId": entry_id, "partitionIndex": -1, "batchIndex": -1, "isExcluded": True}
        self._reset(topic, subscription, "resetcursor", body)

    def reset_to_time(self, topic: str, subscription: str, published_at: int) -> None:
        """Sets a subscription of a topic partition to go on with messages published at a time or later.

        Args:
            published_at: the time, ms since the epoch; 0: all messages.

        Raises:
            PulsarError: also if there is no such subscription.
        """
        self._reset(topic, subscription, f"resetcursor/{published_at}")

    def skip_all(self, topic: str, subscription: str) -> None:
        """Sets a subscription of a topic partition to go on with messages published from now on.

        Raises:
            PulsarError: also if there is no such subscription.
        """
        self._reset(topic, subscription, "skip_all")

    def _reset(self, topic: str, subscription: str, how: str, body: Any = None) -> None:
        self._admin.change("POST", f"{_path(topic)}/subscription/{quote(subscription, safe='')}/{how}", body)

    def individually_acknowledged(self, topic: str, subscription: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Returns the ranges of entries beyond its mark-delete position that a subscription has acknowledged.

        Args:
            topic: a topic partition.
            subscription: its subscription.

        Returns:
            for each range the positions before its first entry and of its last one, (ledger, entry), ascending; empty
            also if there is no such topic or subscription.
        """
        response = self._admin.request("GET", f"{_path(topic)}/internalStats")
        if response.status_code == 404:
            return []
        cursor = self._admin.body(response)["cursors"].get(subscription, {})
        return entry_ranges(cursor.get("individuallyDeletedMessages", ""))

    def has_room(self, topic: str, subscription: str) -> bool:
        """Whether every consumer of a topic partition's subscription has permits left for further messages."""
        found = self._admin.json("GET", f"{_path(topic)}/stats")["subscriptions"].get(subscription, {})
        return all(c["availablePermits"] > 0 for c in found.get("consumers", []))

    def connections(self, topic: str, subscription: str) -> list[str]:
        """Returns a text for each consumer of a topic partition's subscription, which changes at a reconnection."""
        found = self._admin.json("GET", f"{_path(topic)}/stats")["subscriptions"].get(subscription, {})
        return [f"{c['address']} {c['connectedSince']}" for c in found.get("consumers", [])]

    def entry_metadata(self, topic: str, ledger_id: int, entry_id: int) -> BrokerEntry | None:
        """Returns the metadata of an entry of a topic or partition; None: the broker does not have the entry.

        Raises:
            NoAnswerError: the broker does not answer for this entry.
            UnreadableEntryError: the broker certainly has the entry, and does not describe it.
        """
        response = self._of_entry("HEAD", topic, ledger_id, entry_id, _ENTRY_SECONDS)
        return None if response is None else broker_entry(response.headers)

    def _of_entry(
        self, method: str, topic: str, ledger_id: int, entry_id: int, timeout_seconds: float
    ) -> httpx.Response | None:
        """Asks the broker for an entry; None: the broker does not have the entry.

        It asks twice if the broker answers 500, as it does for an entry that the ledger does not have, and while the
        topic moves to another broker; and if a GET gets no answer in time.

        Raises:
            UnreadableEntryError: the broker has the entry, but does not return it, after two requests.
            NoAnswerError: no answer to a HEAD came in time.
        """
        for attempt in range(2):
            if attempt:
                time.sleep(_AGAIN_SECONDS)
            try:
                response = self._admin.request(method, _entry_path(topic, ledger_id, entry_id), timeout=timeout_seconds)
            except NoAnswerError:
                if method != "GET":
                    raise
                continue
            if response.status_code == 404:  # the ledger is gone
                return None
            if response.status_code == 200:
                return response
            if response.status_code != 500:
                raise self._admin.refused(response)
        self._check_gone(topic, ledger_id, entry_id)
        return None

    def _check_gone(self, topic: str, ledger_id: int, entry_id: int) -> None:
        """Checks that the broker does not have an entry that it did not return.

        Raises:
            UnreadableEntryError: it has the entry.
        """
        stats = self.internal_stats(topic)
        if stats is not None and entry_id < stats.ledgers.get(ledger_id, 0):
            raise UnreadableEntryError(
                f"{topic}: the broker does not describe the entry {ledger_id}:{entry_id}, which it has"
            )


def _entry_path(topic: str, ledger_id: int, entry_id: int) -> str:
    return f"{_path(topic)}/ledger/{ledger_id}/entry/{entry_id}"


def _path(topic: str) -> str:
    domain, _, rest = topic.partition("://")
    parts = rest.split("/", 2)
    if domain != "persistent" or len(parts) != 3 or not all(parts):
        raise PulsarError(f"{topic}: must be a topic's full name: persistent://tenant/namespace/topic")
    return "/".join([domain, *(quote(part, safe="") for part in parts)])


def _schemas_path(topic: str) -> str:
    return _path(topic).replace("persistent/", "schemas/", 1)
