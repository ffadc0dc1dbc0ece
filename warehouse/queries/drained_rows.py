"""Reads rounds of messages that are parked: the first of them, for subscriptions that are resumed, and slow ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.message_state.parking import Round, Rounds
from tracker.messages import MESSAGES, concat, empty_table, in_order_of_dues, int64, is_among, typed, where
from tracker.packing import fitting
from warehouse.delta.tables import Tables
from warehouse.named_queries import ALL, NamedQueries, Sql, all_of, columns
from warehouse.pending import are_moved_on
from warehouse.queries.index_rows import near_entries

# What the rounds of one tick have together: rows, and bytes; of each subscription one message in any case.
ROUND_ROWS = 10_000
ROUND_BYTES = 16 << 20
MAX_ROUNDS = 8  # so many resumed subscriptions have a round in a tick

_PLACE = ["ledger_id", "entry_id", "batch_index", "sequence"]
_SQL = NamedQueries(__file__, place=columns(_PLACE), held_deliver_at=HELD_DELIVER_AT)
_NONE_OF_THEM = 0  # a round's `until` before everything: it has nothing that is parked
_LEAST_PLACES = 20_000  # so many rows are looked at first, then so many times more: some have gone out
_GROWTH = 8


class Limits(NamedTuple):
    """What a subscription's round has at most.

    Attributes:
        rows: how many messages.
        n_bytes: of payloads and properties; the first message is in the round in any case.
        since: nothing that is parked was due before, ms since the epoch.
    """

    rows: int = ROUND_ROWS
    n_bytes: int = ROUND_BYTES
    since: int = 0


def shared_by(subscriptions: int) -> Limits:
    """Returns the limits of each of several subscriptions that have a round in one tick."""
    return Limits(ROUND_ROWS // max(1, subscriptions), ROUND_BYTES // max(1, subscriptions))


def first_rounds(tables: Tables, version: int, subscriptions: Sequence[tuple[str, str]]) -> tuple[pa.Table, Rounds]:
    """Reads the first rounds of subscriptions that are resumed together.

    MAX_ROUNDS of them get messages in these, those of the others have to wait for the next rounds.

    Args:
        tables: of the warehouse.
        version: of the delayed index.
        subscriptions: (source topic, name) of each.

    Returns:
        the rows of all rounds, as MESSAGES; and the rounds.
    """
    parked = {
        (row["topic"], row["subscription"]): (row["n"], row["n_bytes"])
        for row in (tables.query("delayed_index", _SQL("parked"), version).to_pylist() if subscriptions else ())
    }
    found: list[pa.Table] = []
    rounds: dict[str, dict[str, Round]] = {topic: {} for topic, _ in subscriptions}
    with_some = [target for target in sorted(subscriptions) if target in parked]
    limits = shared_by(min(len(with_some), MAX_ROUNDS))
    for topic, name in subscriptions:
        rounds[topic][name] = Round(_NONE_OF_THEM, *parked[topic, name]) if (topic, name) in parked else Round()
    for topic, name in with_some[:MAX_ROUNDS]:
        rows, rounds[topic][name] = find_first_held(tables, version, topic, name, limits)
        found.append(rows)
    return concat(found), rounds


def next_rounds(
    tables: Tables, version: int, drains: Mapping[str, Mapping[str, int]], since: Mapping[str, Mapping[str, int]]
) -> tuple[pa.Table, Rounds]:
    """Reads a round for each of some subscriptions.

    Args:
        tables: of the warehouse.
        version: of the delayed index.
        drains: by source topic and subscription the most messages.
        since: as `Limits.since`, where it is known.

    Returns:
        the rows of all rounds, as MESSAGES; and the rounds.
    """
    shared = shared_by(sum(map(len, drains.values())))
    found: list[pa.Table] = []
    rounds: dict[str, dict[str, Round]] = {}
    for topic, names in drains.items():
        for name, most in names.items():
            limits = Limits(most, shared.n_bytes, since.get(topic, {}).get(name, 0))
            rows, one = find_first_held(tables, version, topic, name, limits)
            found.append(rows)
            rounds.setdefault(topic, {})[name] = one
    return concat(found), rounds


def find_first_held(tables: Tables, version: int, topic: str, name: str, limits: Limits) -> tuple[pa.Table, Round]:
    """Reads the sealed rows of the messages that were due first, of those parked for a subscription.

    Args:
        version: of the delayed index.
        topic: the source topic.
        name: of the subscription.
        limits: of the round.

    Returns:
        the rows, as MESSAGES, in the order in which they were due; and the round.
    """
    own = {"topic": topic, "subscription": name}
    n = max(_LEAST_PLACES, 2 * limits.rows)
    while True:
        places = tables.query("delayed_index", _SQL("places", since=limits.since, n=n, **own), version)
        if not places.num_rows:
            return empty_table(MESSAGES), Round()
        moves = tables.query("delayed_index", _SQL("moves", near=near_entries(places), **own), version)
        waiting = in_order_of_dues(where(places, ~are_moved_on(places, moves)))
        if has_all := places.num_rows < n:
            break
        if waiting.num_rows >= limits.rows:
            break
        n *= _GROWTH
    sizes = int64(waiting.set_column(0, "size", pc.fill_null(waiting["payload_bytes"], 0)), "size")
    first = waiting.slice(0, min(limits.rows, fitting(sizes, limits.n_bytes)))
    if not first.num_rows:
        return empty_table(MESSAGES), Round()
    # The properties of few are read.
    with_properties = _rows(tables, version, first, own, _SQL("place_and_size"))
    first = first.slice(0, fitting(int64(with_properties, "size"), limits.n_bytes))
    rows = typed(_rows(tables, version, first, own, ALL), MESSAGES)
    if has_all and first.num_rows == waiting.num_rows:
        return rows, Round()
    until = first["was_due"][first.num_rows - 1].as_py()
    [all_parked] = tables.query("delayed_index", _SQL("count", since=limits.since, **own), version).to_pylist()
    gone = places.num_rows - waiting.num_rows + first.num_rows
    gone_bytes = (pc.sum(places["payload_bytes"]).as_py() or 0) - int(sizes[first.num_rows :].sum())
    left, left_bytes = max(1, all_parked["n"] - gone), max(0, all_parked["n_bytes"] - gone_bytes)
    return rows, Round(HELD_DELIVER_AT if until is None else until, left, left_bytes)


def _rows(tables: Tables, version: int, first: pa.Table, own: Mapping[str, str], selected: Sql) -> pa.Table:
    """Reads columns of the rows of places, in the order in which they were due; few others are read."""
    (since, start), (until, end) = (
        (first["was_due"][i].as_py(), first["sequence"][i].as_py()) for i in (0, first.num_rows - 1)
    )
    conditions: list[Sql] = []
    if since is not None:
        bound = "was_due_from_or_unknown" if until is None else "was_due_from"
        conditions.append(_SQL(bound, due=since, sequence=start))
    if until is not None:
        conditions.append(_SQL("was_due_until", due=until, sequence=end))
    sequences = pc.min_max(first["sequence"]).as_py()
    lowest, highest = sequences["min"], sequences["max"]
    sql = _SQL(
        "rows",
        columns=selected,
        near=near_entries(first),
        lowest=lowest,
        highest=highest,
        was_due=all_of(conditions),
        **own,
    )
    rows = tables.query("delayed_index", sql, version)
    return in_order_of_dues(where(rows, is_among(rows, first, _PLACE)))
