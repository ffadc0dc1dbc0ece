"""Which entries of another broker a backup has: against topics that replicate each other, entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.clusters.replicas import REPLICAS
from broker.position import START, Position
from broker.protocol.reading import ReadMessage
from checkpoint_from_tables.rebuild.context import DestinationReading, RebuildContext
from checkpoint_from_tables.rebuild.delivered import read_delivered
from checkpoint_from_tables.rebuild.destinations import write_missing_deliveries
from checkpoint_from_tables.restore.another_broker import compare, compared_since
from conf.settings import Settings
from tests.support.fuzzing.examples import examples
from tests.support.warehouse.tables import DAY, HOUR, NOW, TOPIC, make, rows
from warehouse.delta.tables import Tables
from warehouse.renumber_message_ids import PAIRS, Renumbering, renumber
from warehouse.routes.membership import Memberships

KNOWN = pa.schema(
    [
        ("old_ledger", pa.int64()),
        ("old_entry", pa.int64()),
        ("publish_time", pa.int64()),
        ("producer_name", pa.string()),
        ("batch_size", pa.int32()),
    ]
)
MINUTE = 60_000


@dataclass(frozen=True)
class Sent:
    """A message as its producer sent it to a cluster, `east` or `west`; `number` tells those of one time apart."""

    number: int
    cluster: str
    minute: int
    producer: str


@dataclass(frozen=True)
class History:
    """What two clusters have of a topic: each its own messages, and in between those of the other, in their order."""

    east: list[Sent]
    west: list[Sent]
    durable: int  # how many of east's entries the backup has
    tells: bool  # whether brokers tell where they have what they replicate


@st.composite
def histories(draw: st.DrawFn) -> History:
    times = sorted(draw(st.lists(st.integers(0, 6), max_size=14)))
    sent = [
        Sent(i, draw(st.sampled_from(["east", "west"])), time, draw(st.sampled_from("pq")))
        for i, time in enumerate(times)
    ]
    of = {name: [s for s in sent if s.cluster == name] for name in ("east", "west")}

    def merged(one: list[Sent], other: list[Sent]) -> list[Sent]:
        rest, result = [list(one), list(other)], []
        while rest[0] or rest[1]:
            side = draw(st.booleans()) if rest[0] and rest[1] else not rest[0]
            result.append(rest[int(side)].pop(0))
        return result

    lag = draw(st.integers(0, len(of["east"])))
    east = merged(of["east"], of["west"][: draw(st.integers(0, len(of["west"])))])
    west = merged(of["west"], of["east"][: len(of["east"]) - lag])
    return History(east, west, draw(st.integers(0, len(east))), draw(st.booleans()))


def of(history: History) -> tuple[pa.Table, pa.Table]:
    """Returns REPLICAS of west, whose ids are those of ledger 3, and what the backup has of east, in ledger 7."""
    at = {sent: i for i, sent in enumerate(history.east)}
    replicas = []
    for i, sent in enumerate(history.west):
        is_told = history.tells and sent.cluster == "east"
        old = (7, at[sent]) if is_told else (None, None)
        name = f"{sent.cluster} {sent.producer}"
        replicas.append((3, i, 3, i, sent.minute * MINUTE, name, 1, *old))
    durable = [
        (7, i, sent.minute * MINUTE, f"{sent.cluster} {sent.producer}", 1)
        for i, sent in enumerate(history.east[: history.durable])
    ]
    return table(replicas, REPLICAS), table(durable, KNOWN)


def table(rows: Sequence[tuple[object, ...]], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


@given(histories())
@settings(max_examples=examples(300), deadline=None)
def test_what_the_backup_lacks_is_read_and_what_comes_again_is_known(history: History) -> None:
    found = compare(*of(history))
    durable = set(history.east[: history.durable])
    passed = [s for i, s in enumerate(history.west) if Position(3, i) <= found.read_after]
    assert set(passed) <= durable, "nothing is passed over that the backup lacks"
    pairs = {new: old for _, old, _, new in zip(*(c.to_pylist() for c in found.pairs.columns), strict=True)}
    assert all(history.west[new] == history.east[old] for new, old in pairs.items()), "a pair is one message"
    again = [i for i, s in enumerate(history.west) if s in durable and Position(3, i) > found.read_after]
    twice = [i for i in again if i not in pairs]
    assert len(twice) <= found.unclear
    if history.tells and all(s.cluster == "east" for s in history.east + history.west):
        assert not twice
    assert found.known == sum(s in durable for s in history.west) - len(twice)
    assert found.known + found.new == len(history.west)
    assert found.missing == history.durable - found.known


def replicas_of(*rows: tuple[int, Position, int, int | None]) -> pa.Table:
    """REPLICAS of (entry, where its message begins, minute, entry in the earlier broker)."""
    values = [
        (3, entry, *begin, minute * MINUTE, "p", 1, None if old is None else 7, old)
        for entry, begin, minute, old in rows
    ]
    return table(values, REPLICAS)


def known_of(*rows: tuple[int, int]) -> pa.Table:
    """The entries of a backup: (entry, minute)."""
    return table([(7, entry, minute * MINUTE, "p", 1) for entry, minute in rows], KNOWN)


def test_a_chunked_message_that_was_not_whole_is_read_from_its_first_chunk() -> None:
    first = [(i, Position(3, i), i, i) for i in range(5)]
    known = known_of(*((i, i) for i in range(5)))
    assert compare(replicas_of(*first, (9, Position(3, 3), 9, 9)), known).read_after == Position(3, 1), "2 minutes"
    assert compare(replicas_of(*first, (9, Position(3, 1), 9, 9)), known).read_after == Position(3, 0)
    assert compare(replicas_of(*first, (9, Position(3, 0), 9, 9)), known).read_after == START
    assert compare(replicas_of(*first), known).read_after == Position(3, 1), "one may come yet"


def test_an_id_of_a_third_cluster_is_not_taken_for_one_of_the_backup() -> None:
    found = compare(replicas_of((0, Position(3, 0), 8, 2)), known_of(*((i, i) for i in range(5))))
    assert (found.known, found.new, found.pairs.num_rows) == (0, 1, 0)


@pytest.mark.parametrize("tells", [False, True])
def test_what_the_other_broker_published_itself_and_is_sealed_and_not_durable_comes_again_as_the_same(
    tells: bool,
) -> None:
    east, west = Sent(0, "east", 0, "p"), Sent(1, "west", 1, "q")
    replicas, known = of(History([east, west], [east, west], durable=1, tells=tells))
    sealed = table([(7, 1, MINUTE, "west q", 1)], KNOWN)
    found = compare(replicas, known, later=sealed)
    assert found.new == 1, "it is read"
    pairs = [tuple(row.values()) for row in found.pairs.to_pylist()]
    assert (7, 1, 3, 1) in pairs, "by the id with which it comes"


def test_what_a_broker_tells_makes_clear_which_others_of_one_time_were_sealed_and_not_durable() -> None:
    """Both had the same producer name, and were published at the same time: one here, one there."""
    sealed = table([(7, i, 4 * MINUTE, "p", 1) for i in (0, 1)], KNOWN)
    found = compare(replicas_of((0, Position(3, 0), 4, None), (1, Position(3, 1), 4, 0)), known_of(), later=sealed)
    pairs = [tuple(row.values()) for row in found.pairs.to_pylist()]
    assert sorted(pairs) == [(7, 0, 3, 1), (7, 1, 3, 0)]
    assert (found.new, found.unclear) == (2, 0)


def test_what_is_not_clear_counts_as_new() -> None:
    one = (0, Position(3, 0), 4, None)
    assert compare(replicas_of(one), known_of((0, 4))).known == 1
    found = compare(replicas_of(one, (1, Position(3, 1), 4, None)), known_of((0, 4)))
    assert (found.known, found.new, found.unclear) == (0, 2, 2)


def test_a_topic_without_entries_has_none_of_the_backup() -> None:
    found = compare(REPLICAS.empty_table(), known_of((0, 4)))
    assert (found.read_after, found.known, found.new, found.missing) == (START, 0, 0, 1)
    assert compare(replicas_of((0, Position(3, 0), 4, 0)), KNOWN.empty_table()).new == 1


@pytest.mark.slow
def test_what_the_destinations_have_counts_by_its_new_ids_and_later_not_at_all(tmp_path: Path) -> None:
    route = {"source": TOPIC, "subscriptions": [{"name": "a"}]}
    made = Settings(warehouse=f"file:{tmp_path}/w", routes=(route,))  # type: ignore[arg-type]
    tables = Tables(made.warehouse)
    tables.create()
    tables.append("entries", rows("entries", [{"ledger_id": 7, "entry_id": i} for i in range(3)]), {})
    sent = [
        ReadMessage(
            f"{TOPIC}-a",
            Position(1, entry),
            NOW,
            "delaylake-0123456789ab-01234567-a-0",
            {"delaylake.source": TOPIC, "delaylake.messageId": f"7:{entry}:-1:-1", "delaylake.deliverAt": "1"},
        )
        for entry in (1, 2, 5)
    ]
    # 7:5 came after the backup, and is 3:9 here.
    renumbering = Renumbering(1, pa.table([[7, 7], [2, 5], [3, 3], [6, 9]], schema=PAIRS), {TOPIC: Position(3, 6)})
    renumber(tables, renumbering, NOW + 1)

    def found(of: Renumbering | None) -> list[tuple[int, int]]:
        durable = {TOPIC: Position(3, 6)}
        known = read_delivered(tables, {TOPIC: ["a"]}, durable, Memberships(), lambda *_: None)
        brokers = mock.Mock(partition_names=lambda name: [])

        def since(_: object, __: object, topic: str, since: int) -> list[ReadMessage]:
            return [one for one in sent if one.published >= since and topic == one.topic]

        with (
            mock.patch("checkpoint_from_tables.rebuild.destinations.Brokers", return_value=brokers),
            mock.patch("checkpoint_from_tables.rebuild.destinations.AdminClient"),
            mock.patch("checkpoint_from_tables.rebuild.destinations.first_not_durable", return_value=NOW),
            mock.patch("checkpoint_from_tables.rebuild.destinations.messages_since", since),
        ):
            context = RebuildContext(made, made, tables, durable, NOW)
            write_missing_deliveries(context, known, {}, DestinationReading(renumbering=of))
        ids = tables.sql("SELECT ledger_id, entry_id FROM deliveries ORDER BY ledger_id, entry_id")
        tables.delete("deliveries", "true")
        return list(zip(*(column.to_pylist() for column in ids.columns), strict=True))

    assert found(renumbering) == [(3, 6), (3, 9), (renumbering.offset + 7, 1)]
    assert found(None) == []


@pytest.mark.parametrize(
    ("published", "since"),
    [
        ([], 0),
        ([30 * DAY, HOUR, 0], 7 * DAY),  # in between retention has deleted what was delivered a week ago
        ([30 * DAY, 20 * DAY], 20 * DAY + HOUR),  # an hour before the last entry it deletes nothing
        ([2 * DAY, HOUR], 2 * DAY + 15 * MINUTE),
        ([HOUR, -DAY], HOUR + 15 * MINUTE),  # its producer's clock was ahead
    ],
)
def test_nothing_is_compared_of_which_retention_has_deleted_entries(
    tmp_path: Path, published: list[int], since: int
) -> None:
    """What it has deleted the other broker may still have, and it would come twice."""
    made, tables = make(tmp_path)
    entries = [{"ledger_id": 7, "entry_id": i, "publish_time": NOW - age} for i, age in enumerate(published)]
    if entries:
        tables.append("entries", rows("entries", entries), {"job": 1})
    found = compared_since(made, tables, TOPIC, -1, NOW)
    assert found == (NOW - since if published else 0)
