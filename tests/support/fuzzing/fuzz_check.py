"""Whether each of many messages arrived once, as it was sent, or was put aside for a reason."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pulsar

from broker.protocol.entries import NOT_DECRYPTED
from broker.pulsar_admin.admin_rest import AdminClient
from tests.support.fuzzing.fuzz import LARGEST, OWN, STRANGERS, Fuzz, Producers
from tracker.due_time import MAX_TIME_MILLIS
from tracker.wire.message_id_pb2 import MessageIdData
from warehouse.unseen_entries import UNREADABLE


@dataclass(frozen=True)
class Seen:
    """A message as a client sees it; two are equal where all of that is."""

    number: str
    digest: bytes
    schema_version: int
    size: int
    is_rejectable: bool
    properties: dict[str, str]


def seen(message: pulsar.Message) -> Seen:
    inner = message._message
    properties = message.properties()
    theirs = sorted((k, v) for k, v in properties.items() if not k.startswith("delaylake."))
    key, ordering_key = message.partition_key(), ordering_key_of(message)
    digest = hashlib.blake2b(digest_size=16)
    for part in (key, theirs, message.event_timestamp(), inner.has_null_value(), ordering_key):
        digest.update(repr(part).encode())
    data = message.data()
    digest.update(data)
    size = len(data) + len(key.encode()) + len(ordering_key)
    size += sum(len(k.encode()) + len(v.encode()) for k, v in properties.items())
    is_rejectable = size > LARGEST - 4_000 or message.event_timestamp() >= 2**63 or not _has_time(properties)
    number = properties.get("n", "")
    ours = {k: v for k, v in properties.items() if k.startswith("delaylake.")}
    return Seen(number, digest.digest(), inner.int_schema_version(), size, is_rejectable, ours)


def ordering_key_of(message: pulsar.Message) -> bytes:
    try:
        return bytes(message.ordering_key(), "utf-8")
    except UnicodeDecodeError as error:
        return bytes(error.object)


def _has_time(properties: dict[str, str]) -> bool:
    for name in ("deliverAt", "deliverAfter"):
        if name in properties:
            text = properties[name]
            return text.isascii() and text.isdigit() and len(text) < 19 and int(text) <= MAX_TIME_MILLIS
    return True


class Topics:
    """Reads whole topics."""

    def __init__(self, client: pulsar.Client, admin: AdminClient) -> None:
        self._client = client
        self._admin = admin

    def read(self, topic: str, key: Path | None = None) -> Iterator[tuple[str, Seen]]:
        """The messages that there are now, each with its id: ledger:entry:partition:batchIndex.

        Args:
            key: decrypts messages; those for which it is the wrong one do not come.
        """
        for name in self._client.get_topic_partitions(topic):
            partition = int(name.rpartition("-partition-")[2]) if name != topic else -1
            for message in self._read(name, key):
                found = message.message_id()
                yield f"{found.ledger_id()}:{found.entry_id()}:{partition}:{found.batch_index()}", seen(message)

    def _read(self, topic: str, key: Path | None) -> Iterator[pulsar.Message]:
        subscription = f"read-{uuid.uuid4()}"  # a blank would have another name in the broker's answer
        reader = None if key is None else pulsar.CryptoKeyReader("", str(key))
        consumer = subscribe(self._client, topic, subscription, reader)
        newest = consumer.get_last_message_id()
        last = newest.ledger_id(), newest.entry_id()
        position, is_whole = (-1, -1), True
        while position < last or not is_whole:
            try:
                message = consumer.receive(2_000)
            except pulsar.Timeout:  # the last entries may be markers
                state = self._admin.internal_stats(topic)
                assert state is not None
                if state.next_read[subscription] > last:
                    break
                if not self._admin.has_room(topic, subscription):
                    # Of a batch that it can't decrypt the client gives back room for one message.
                    if position > (-1, -1):
                        consumer.acknowledge_cumulative(pulsar.MessageId(-1, *position, -1))
                    consumer.close()
                    consumer = subscribe(self._client, topic, subscription, reader)
                continue
            found = message.message_id()
            position = found.ledger_id(), found.entry_id()
            is_whole = found.batch_index() + 1 in (0, _batch_size_of(found))
            yield message
        consumer.unsubscribe()
        consumer.close()


def subscribe(
    client: pulsar.Client, topic: str, subscription: str, key_reader: pulsar.CryptoKeyReader | None
) -> pulsar.Consumer:
    """Subscribes to a topic partition: durable, exclusive, from the beginning."""
    return client.subscribe(
        topic,
        subscription,
        consumer_type=pulsar.ConsumerType.Exclusive,
        initial_position=pulsar.InitialPosition.Earliest,
        receiver_queue_size=2_000,
        max_pending_chunked_message=100,
        crypto_key_reader=key_reader,
        # With CONSUME the client writes beyond its memory if an encrypted message is in chunks.
        crypto_failure_action=pulsar.ConsumerCryptoFailureAction.DISCARD,
    )


def check(fuzz: Fuzz, producers: Producers, topics: Topics, rejects: dict[str, str]) -> dict[str, int]:
    """Asserts that each message that a source topic has came once to its destination as it was, or was rejected.

    Args:
        rejects: by id the reason, of the table.

    Returns:
        how many were delivered, rejected, and rejected because they are encrypted for others.
    """
    wrong: dict[str, list[str]] = {name: [] for name in ("lost", "doubled", "changed", "rejected", "unexpected")}
    left = set(producers.sent)
    known: set[str] = set()
    found = {"delivered": 0, "rejected": 0, "unreadable": 0}
    for topic in fuzz.topics:
        source = dict(topics.read(topic, fuzz.key_files[OWN]))
        known |= source.keys()
        left -= {message.number for message in source.values()}
        if any(fuzz.is_for_strangers(producer) for producer in fuzz.producers if producer["topic"] == topic):
            for message_id, message in topics.read(topic, fuzz.key_files[STRANGERS]):
                if message_id in source:
                    continue
                left.discard(message.number)
                known.add(message_id)
                found["unreadable"] += 1
                if "encrypted" not in rejects.get(message_id, ""):
                    wrong["lost"].append(f"{topic} {message_id} ({message.number}), encrypted")
        came: set[str] = set()
        versions: set[tuple[int, int]] = set()
        for _, arrived in topics.read(f"{topic}-a"):
            message_id = arrived.properties.get("delaylake.messageId", "")
            original = source.get(message_id)
            if original is None or arrived.properties["delaylake.source"] != topic:
                wrong["unexpected"].append(f"{topic} {message_id}")
                continue
            if message_id in came or message_id in rejects:
                wrong["doubled"].append(f"{topic} {message_id}")
            came.add(message_id)
            if arrived.digest != original.digest or (arrived.schema_version < 0) != (original.schema_version < 0):
                wrong["changed"].append(f"{topic} {message_id} ({original.number})")
            if "delaylake.attempt" in arrived.properties:
                wrong["changed"].append(f"{topic} {message_id}: forged {arrived.properties}")
            versions.add((original.schema_version, arrived.schema_version))
        rejected = source.keys() & rejects.keys()
        wrong["rejected"] += [f"{topic} {i}: {rejects[i]}" for i in rejected if not source[i].is_rejectable]
        wrong["lost"] += [f"{topic} {i} ({source[i].number})" for i in source.keys() - came - rejected]
        assert len(versions) == len({of_source for of_source, _ in versions}), versions
        found["delivered"] += len(came)
        found["rejected"] += len(rejected)
    # Of what was aborted, encrypted and compressed the broker does not tell that it is nothing to deliver. Of a message
    # that can't be decrypted each chunk is rejected.
    others = {i: r for i, r in rejects.items() if UNREADABLE not in r and r != NOT_DECRYPTED}
    wrong["unexpected"] += [f"{i}: {r}" for i, r in others.items() if i not in known]
    assert not left, f"the sources lack {len(left)}: {sorted(left)[:5]}"
    assert not any(wrong.values()), {what: (len(all_), all_[:5]) for what, all_ in wrong.items() if all_}
    return found


def _batch_size_of(message_id: pulsar.MessageId) -> int:
    """The number of messages in a message's entry."""
    return MessageIdData.FromString(message_id.serialize()).batch_size or 1
