"""Finds entries that the broker never handed to the job, by asking it about a gap, and writes them to `rejects`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from broker.client import NoAnswerError
from broker.entries.continuity import Gap, missing_ranges, positions_in
from broker.position import START, Position, SourceTopic
from broker.protocol.brokers import Brokers
from broker.protocol.entries import Envelope
from broker.protocol.reading import read_entries
from broker.pulsar_admin.admin_rest import AdminClient, UnreadableEntryError
from broker.pulsar_admin.answers import BrokerEntry
from conf.errors import DelayLakeError
from status.alerts import NOT_SEEN_REASON
from tracker.properties import MessagePosition
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries
from warehouse.schemas import REJECTS

_SQL = NamedQueries(__file__, not_seen=f"{NOT_SEEN_REASON}%")

_MAX_ASKED = 1_000  # entries of a gap that the broker is asked about, one by one
_MAX_ROWS = 100_000  # of a gap; the last row stands for the rest
_MAX_PAYLOAD_BYTES = 64 * 1024 * 1024  # of a gap: beyond this, payloads are not stored in `rejects`
_ASKED_AT_ONCE = 8

_PASSED_OVER = "skipped, cleared or expired for the job's subscription, or unreadable for its client"
_ENCRYPTED = "encrypted, and no key that decrypts it is in the settings (pulsar.crypto_private_key_file)"
GONE = "the broker no longer has it"
_NOT_ASKED = "one of so many that the broker was not asked about it"
UNREADABLE = "the broker does not describe it, as entries that are encrypted and compressed, or have many properties"
_MAX_UNREADABLE = 64  # of a gap: after so many entries that the broker can't describe, it is not asked about more
_MAX_READ_BYTES = 256 << 20  # of a gap: of such entries, and of those between them


class NotDurableError(DelayLakeError):
    """What the tables are asked about an entry they may have later. The message is one line.

    Attributes:
        gap: what to ask about later instead of the gap, since the broker may have trimmed more by then; None: the same.
    """

    def __init__(self, message: str, gap: Gap | None = None) -> None:
        super().__init__(message)
        self.gap = gap


@dataclass(frozen=True)
class NotSeen:
    """The entries of a gap, as the broker describes them.

    Attributes:
        rows: the entries that the job never got, as REJECTS, one each; the last row may stand for several.
        passed: the number of entries with nothing to deliver: markers, aborted messages, chunks but for the last one.
    """

    rows: pa.Table
    passed: int


def find_not_seen(
    admin: AdminClient,
    source: SourceTopic,
    gap: Gap,
    index_of: Callable[[Position], int | None],
    brokers: Brokers | None = None,
) -> NotSeen:
    """Asks the broker which entries are missing in a gap.

    Args:
        index_of: returns the broker entry index of an entry's last message, or None. Called for the entry before the
            gap, if its index is unknown and the broker may have trimmed ledgers of the gap. What it raises is raised.
        brokers: to read the entries that the broker does not describe; None: they are not read.

    Raises:
        PulsarError: the broker does not answer.
        NotDurableError: by `index_of`.
    """
    stats = admin.internal_stats(source.name)
    ledgers = {} if stats is None else stats.ledgers
    ranges = missing_ranges(gap, ledgers)
    named = itertools.islice(positions_in(ranges), _MAX_ROWS)
    asked = list(itertools.islice(named, _MAX_ASKED))
    rows: list[dict[str, Any]] = []
    passed = payload_bytes = 0
    unreadable: list[Position] = []

    def ask(position: Position) -> BrokerEntry | str | None:
        if len(unreadable) >= _MAX_UNREADABLE:
            return _NOT_ASKED
        try:
            return admin.entry_metadata(source.name, position.ledger_id, position.entry_id)
        except NoAnswerError:
            unreadable.append(position)
            return UNREADABLE

    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        answers = dict(zip(asked, pool.map(ask, asked), strict=True))
    if unreadable and brokers is not None:
        answers |= _read(brokers, source, [p for p, answer in answers.items() if isinstance(answer, str)])
    for position, entry in answers.items():
        if isinstance(entry, str):
            rows.append(_row(source, position, entry))
            continue
        if entry is not None and entry.is_no_message:
            passed += 1
            continue
        payload = None
        if entry is not None and payload_bytes < _MAX_PAYLOAD_BYTES:
            payload = _payload(admin, source, position)
            payload_bytes += len(payload or b"")
        rows.append(_row(source, position, _why(entry), entry, payload))
    if any(isinstance(answer, str) for answer in answers.values()):
        admin.internal_stats(source.name)  # raises if the broker does not answer at all
    rows += [_row(source, position, _NOT_ASKED) for position in named]
    n = sum(last - first + 1 for _, first, last in ranges)
    if n > _MAX_ROWS:
        rows[-1]["reason"] += f", the first of {n - _MAX_ROWS + 1:,}"
    # The broker trims ledgers in their order: it has that of the entry before, or may have trimmed others of the gap.
    if gap.after.ledger_id < min([gap.before.ledger_id, *ledgers]):
        first = Position(gap.after.ledger_id, gap.after.entry_id + 1)
        described = [entry.batch_size for entry in answers.values() if isinstance(entry, BrokerEntry)]
        others = n - len(described)  # which have a message each, or more
        unnamed = _n_messages(_with_indexes(admin, source, gap, answers, index_of), index_of) - sum(described) - others
        if unnamed > 0:
            number = f"up to {unnamed:,}" if others else f"{unnamed:,}"
            rows.insert(0, _row(source, first, f"{number} messages by their indexes; {GONE}"))
    return NotSeen(pa.Table.from_pylist(rows, schema=REJECTS), passed)


def record(tables: Tables, source: SourceTopic, found: pa.Table) -> int:
    """Writes entries that were not seen to `rejects`, unless it has them; returns the number of rows written.

    This is not a part of a batch, since the broker's answers may differ in a replay. Each entry is written once: only
    one process does this, and it leaves out positions that are there.

    Args:
        found: the entries, as REJECTS.
    """
    if not found.num_rows:
        return 0
    first, last = (end.as_py() for end in pc.min_max(found["ledger_id"]).values())
    topic, partition = source.topic, source.partition
    sql = _SQL("positions_not_seen", topic=topic, partition=partition, first=first, last=last)
    known = set(tables.query("rejects", sql)["position"].to_pylist())
    new = {position: i for i, position in enumerate(found["position"].to_pylist()) if position not in known}
    if new:
        tables.append("rejects", found.take(list(new.values())), {})
    return len(new)


def durable_index(tables: Tables, source: SourceTopic, position: Position) -> int | None:
    """Returns the broker entry index of an entry's last message from the table `entries`; None: it is not there.

    Raises:
        NotDurableError: the table has neither this entry nor a later one yet.
    """
    place: dict[str, str | int] = {
        "topic": source.topic,
        "partition": source.partition,
        "ledger": position.ledger_id,
        "entry": position.entry_id,
    }
    found = tables.query("entries", _SQL("last_index", **place))["last_index"].to_pylist()
    if not found and not tables.query("entries", _SQL("durable_from", **place)).num_rows:
        raise NotDurableError(f"{position} is not durable yet")
    return int(found[0]) if found else None


def _read(brokers: Brokers, source: SourceTopic, positions: list[Position]) -> dict[Position, BrokerEntry]:
    """Reads entries, and returns what their metadata say; those are missing that the broker does not send."""
    wanted, found, n_bytes = set(positions), {}, 0
    before = Position(positions[0].ledger_id, positions[0].entry_id - 1)
    with closing(read_entries(brokers, source.name, before)) as entries:
        for entry in entries:
            n_bytes += entry.n_bytes
            if entry.position in wanted and isinstance(entry.envelope, Envelope):
                found[entry.position] = _described(entry.envelope)
            if n_bytes > _MAX_READ_BYTES or entry.position >= positions[-1]:
                break
    return found


def _described(envelope: Envelope) -> BrokerEntry:
    metadata = envelope.metadata
    return BrokerEntry(
        batch_size=metadata.n_messages,
        publish_time=metadata.publish_time or None,
        producer_name=metadata.producer_name.decode(errors="replace"),
        key=metadata.partition_key.decode(errors="replace") if metadata.HasField("partition_key") else None,
        properties={p.key.decode(errors="replace"): p.value.decode(errors="replace") for p in metadata.properties},
        is_encrypted=bool(metadata.encryption_keys),
        is_no_message=envelope.is_chunk and metadata.chunk_id < metadata.n_chunks - 1,
    )


def _with_indexes(
    admin: AdminClient,
    source: SourceTopic,
    gap: Gap,
    answers: Mapping[Position, BrokerEntry | str | None],
    index_of: Callable[[Position], int | None],
) -> Gap:
    """Returns a gap with the indexes around it: at a topic's end its last entry says which one comes next.

    Args:
        answers: what the broker has said of the gap's entries.

    Raises:
        NotDurableError: by `index_of`, with the gap and the index after it.
    """
    last = max(answers, default=START)
    if gap.before_index is not None or last.next != gap.before or not isinstance(answers[last], BrokerEntry):
        return gap
    later: NotDurableError | None = None
    try:
        after_index = index_of(gap.after) if gap.after_index is None else gap.after_index
    except NotDurableError as error:
        after_index, later = None, error
    index = None if after_index is None and later is None else admin.message_index(source.name, *last)
    if index is None:
        return gap
    gap = replace(gap, after_index=after_index, before_index=index + 1)
    if later is not None:
        raise NotDurableError(str(later), gap)
    return gap


def _n_messages(gap: Gap, index_of: Callable[[Position], int | None]) -> int:
    """Returns the number of missing messages, by the indexes around a gap; 0 also where they are not known."""
    if gap.before_index is None:
        return 0
    after_index = index_of(gap.after) if gap.after_index is None else gap.after_index
    if after_index is None:
        return 0
    if gap.before_index <= after_index:  # the topic was deleted and made again, and counts from 0
        after_index = -1
    return gap.before_index - after_index - 1


def _payload(admin: AdminClient, source: SourceTopic, position: Position) -> bytes | None:
    """Returns an entry's bytes; None: the broker does not have them, or can't read them."""
    try:
        content = admin.entry(source.name, position.ledger_id, position.entry_id)
    except UnreadableEntryError:
        return None
    return None if content is None else content[1]


def _why(entry: BrokerEntry | None) -> str:
    if entry is None:
        return GONE
    return _ENCRYPTED if entry.is_encrypted else _PASSED_OVER


def _row(
    source: SourceTopic,
    position: Position,
    why: str,
    entry: BrokerEntry | None = None,
    payload: bytes | None = None,
) -> dict[str, Any]:
    published = None if entry is None else entry.publish_time
    return {
        "topic": source.topic,
        "partition": source.partition,
        "ledger_id": position.ledger_id,
        "entry_id": position.entry_id,
        "batch_index": -1,
        "position": str(MessagePosition(*position, source.partition, -1)),
        "reason": f"{NOT_SEEN_REASON}: {why}",
        # Rows age by this, so it is the current time if the broker does not know the entry's publish time.
        "publish_time": time.time_ns() // 1_000_000 if published is None else published,
        "producer_name": None if entry is None else entry.producer_name,
        "key": None if entry is None else entry.key,
        "properties": [] if entry is None else list(entry.properties.items()),
        "payload": payload,
        "batch_id": 0,
    }
