"""Rows of the delayed index, read as segments by time or for commands by entry; and rows to write to the tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.time_slots import SLOT_MILLIS
from tracker.commands.message_state.moves import HELD_DELIVER_AT
from tracker.commands.schema import CANCEL, KINDS_WITH_PAYLOAD, KNOWN, SKIP, command_positions
from tracker.keys.cold_keys import times_of
from tracker.keys.sealed_keys import KEYED
from tracker.messages import (
    MESSAGES,
    BoolArray,
    Int64Array,
    concat,
    has_occurrences,
    int64,
    is_among,
    of_entries,
    position_texts,
    typed,
    where,
)
from tracker.wire.delaylake_pb2 import Result
from warehouse.delta.tables import Tables, any_of, literal, ranges_of
from warehouse.pending import are_moved_on
from warehouse.schemas import DELAYED_INDEX, OUTCOMES, REJECTS

# The tables that are looked up for a command: the messages that it names, and its first answer if it is repeated.
LOOKED_UP = ["delayed_index", "entries", "outcomes"]

_ENTRY_AS_KNOWN = (
    "topic, partition, ledger_id, entry_id, CAST(-1 AS INT) AS batch_index, batch_size, CAST(0 AS BIGINT) AS deliver_at"
)
_AS_IT_CAME = "operation = 'DELAY' AND sequence IS NULL"
_ENTRY = ["ledger_id", "entry_id"]
_MAX_RANGES = 50


def rows_due(tables: Tables, version: int, start: int, end: int) -> list[tuple[int, int]]:
    """Counts the rows of a version of the delayed index that are due from `start` to before `end`, ms since the epoch.

    Returns:
        (time slot, number of rows) of each slot that has rows, ascending; a slot is its time / SLOT_MILLIS.
    """
    counts = tables.query(
        "delayed_index",
        f"SELECT deliver_at / {SLOT_MILLIS} AS slot, count(*) AS n FROM delayed_index "  # noqa: S608
        f"WHERE deliver_at >= {start} AND deliver_at < {end} AND operation = 'DELAY' GROUP BY 1 ORDER BY 1",
        version,
    )
    return list(zip(counts["slot"].to_pylist(), counts["n"].to_pylist(), strict=True))


def read_segment(tables: Tables, version: int, start: int, end: int) -> pa.Table:
    """Reads the DELAY rows of a version of the delayed index that are due from `start` to before `end`, as MESSAGES.

    Args:
        start: ms since the epoch.
        end: the same.
    """
    rows = tables.query(
        "delayed_index",
        f"SELECT * FROM delayed_index WHERE deliver_at >= {start} AND deliver_at < {end} "  # noqa: S608
        "AND operation = 'DELAY'",
        version,
    )
    return typed(rows, MESSAGES)


def find_known_messages(tables: Tables, versions: list[int], commands: pa.Table, keyed: Collection[str]) -> pa.Table:
    """Finds the messages of the entries that commands name, as far as they are durable.

    A durable entry that is in no bucket was handed out without being sealed: it has one row here, with deliver_at 0.

    Args:
        versions: those of the tables LOOKED_UP to read.
        commands: with the columns of `tracker.commands.schema.COMMAND_ROWS`.
        keyed: the topics that have had schedule keys.

    Returns:
        with the columns of `tracker.commands.schema.KNOWN`.
    """
    found = _as_they_came(tables, versions, commands, keyed, KNOWN)
    missing = command_positions(commands).join(found.select(_ENTRY), _ENTRY, join_type="left anti", use_threads=False)
    if not missing.num_rows:
        return found
    sql = f"SELECT {_ENTRY_AS_KNOWN} FROM entries WHERE {near(missing)}"  # noqa: S608
    rows = of_entries(typed(tables.query("entries", sql, versions[1]), KNOWN), missing)
    return concat([found, rows], KNOWN)


def _as_they_came(
    tables: Tables, versions: list[int], commands: pa.Table, keyed: Collection[str], schema: pa.Schema
) -> pa.Table:
    """Reads the sealed rows with which the entries that commands name have come, and no row of a move.

    By time first, as the commands or else the entries tell it: the index is in that order, and a file of it that was
    merged may have any entry. With a hundred million rows that is the difference between milliseconds and seconds.

    Args:
        versions, commands, keyed: as of `find_known_messages`.
        schema: KNOWN or MESSAGES.

    Returns:
        as the schema.
    """
    wanted = command_positions(commands)
    columns = ", ".join(name for name in schema.names if name in DELAYED_INDEX.names)
    found: list[pa.Table] = []

    def look_up(condition: str) -> pa.Table:
        sql = f"SELECT {columns} FROM delayed_index WHERE {condition} AND {near(wanted)} AND {_AS_IT_CAME}"  # noqa: S608
        return of_entries(typed(tables.query("delayed_index", sql, versions[0]), schema), wanted)

    def find_by_time(first: Int64Array, last: Int64Array, are_only_there: pa.Table) -> pa.Table:
        """Finds wanted entries in some spans of time; returns those that may have messages at other times."""
        ranges = _covering(first, last)
        if not ranges:
            return wanted
        rows = look_up(f"({any_of('deliver_at', ranges)})")
        # An entry's messages may be due at different times: it is found when all of it is.
        sizes = rows.group_by(_ENTRY).aggregate([("batch_size", "max"), ("batch_index", "count")])
        whole = sizes.filter(pc.greater_equal(sizes["batch_index_count"], sizes["batch_size_max"])).select(_ENTRY)
        done = pa.concat_tables([whole, are_only_there])
        found.append(of_entries(rows, done))
        return wanted.join(done, _ENTRY, join_type="left anti", use_threads=False)

    kinds = pc.is_in(commands["kind"], pa.array([CANCEL, SKIP]))
    named = int64(commands.filter(pc.and_(kinds, pc.greater(commands["deliver_at"], 0))), "deliver_at")
    wanted = find_by_time(named, named, wanted.slice(0, 0))
    if wanted.num_rows:
        times = _times_of(tables, versions[1], wanted)
        # One with a schedule key may be due sooner than its entry says, where that would put the key off for too long.
        are_only_there = times.filter(pc.invert(pc.is_in(times["topic"], pa.array(sorted(keyed), pa.string()))))
        wanted = find_by_time(int64(times, "first_due"), int64(times, "last_due"), are_only_there.select(_ENTRY))
    if wanted.num_rows:
        found.append(look_up("true"))
    return concat(found, schema)


def _times_of(tables: Tables, version: int, wanted: pa.Table) -> pa.Table:
    """When the first and the last messages of wanted entries are due, as far as it is known.

    Returns:
        topic, ledger_id, entry_id, and first_due and last_due, ms since the epoch.
    """
    columns = "topic, ledger_id, entry_id, first_due, coalesce(last_due, first_due) AS last_due"
    sql = f"SELECT {columns} FROM entries WHERE {near(wanted)} AND first_due IS NOT NULL"  # noqa: S608
    return of_entries(tables.query("entries", sql, version), wanted)


def _covering(first: Int64Array, last: Int64Array) -> list[tuple[int, int]]:
    """Covers spans of time, both ends inclusive, (spans,) each, by at most _MAX_RANGES, without the widest gaps."""
    order = np.argsort(first, kind="stable")
    starts, ends = first[order], np.maximum.accumulate(last[order])
    gaps = starts[1:] - ends[:-1]
    widest = np.sort(np.argsort(-gaps, kind="stable")[: _MAX_RANGES - 1])
    cuts = widest[gaps[widest] > 1]
    begin, end = np.concatenate([starts[:1], starts[cuts + 1]]), np.concatenate([ends[cuts], ends[-1:]])
    return list(zip(begin.tolist(), end.tolist(), strict=True))


def find_keyed_messages(
    tables: Tables, version: int, names: Collection[tuple[str, str]], groups: Sequence[int]
) -> pa.Table:
    """Reads the sealed rows with which messages of some schedule keys have come, and perhaps some of others, as KEYED.

    Args:
        version: of the delayed index.
        names: the keys, each with its topic.
        groups: in which they are due, ascending: see `tracker.keys.cold_keys.GROUP_MILLIS`.
    """
    ranges = [times_of(pair) for pair in ranges_of(groups, _MAX_RANGES)]
    topics = ", ".join(map(literal, sorted({topic for topic, _ in names})))
    keys = ", ".join(map(literal, sorted({key for _, key in names})))
    rows = tables.query(
        "delayed_index",
        f"SELECT {', '.join(KEYED.names)} FROM delayed_index WHERE ({any_of('deliver_at', ranges)}) "  # noqa: S608
        f"AND topic IN ({topics}) AND schedule_key IN ({keys}) AND {_AS_IT_CAME}",
        version,
    )
    return typed(rows, KEYED)


def in_index_or_not_durable(tables: Tables, versions: list[int], rows: pa.Table, after: int) -> BoolArray:
    """Tells which rows' entries have a message in the delayed index that is due after a time, or are not durable yet.

    Args:
        versions: those of the tables LOOKED_UP to read.
        rows: with ledger_id and entry_id.
        after: ms since the epoch.

    Returns:
        a mask, bool, (rows,).
    """
    condition = f"{near(rows)} AND {_AS_IT_CAME} AND deliver_at > {after}"
    sql = "SELECT ledger_id, entry_id FROM {} WHERE {}"
    waiting = tables.query("delayed_index", sql.format("delayed_index", condition), versions[0])
    durable = tables.query("entries", sql.format("entries", near(rows)), versions[1])
    return is_among(rows, waiting, _ENTRY) | ~is_among(rows, durable, _ENTRY)


def find_held(tables: Tables, version: int, subscriptions: Sequence[tuple[str, str]]) -> pa.Table:
    """Reads the sealed rows of messages that are held back for subscriptions, as MESSAGES.

    A message that a later move has taken from there is left out, if that move is sealed.

    Args:
        version: of the delayed index.
        subscriptions: (topic, subscription) of each.
    """
    sql = f"SELECT {{}} FROM delayed_index WHERE deliver_at = {HELD_DELIVER_AT} AND operation = {{}} AND {{}}"  # noqa: S608
    found = []
    for topic, name in subscriptions:
        own = f"topic = {literal(topic)} AND subscription = {literal(name)}"
        rows = tables.query("delayed_index", sql.format("*", "'DELAY'", own), version)
        columns = "ledger_id, entry_id, batch_index, sequence"
        moves = tables.query("delayed_index", sql.format(columns, "'MOVE'", own), version)
        found.append(typed(where(rows, ~are_moved_on(rows, moves)), MESSAGES))
    return concat(found)


def find_rows(tables: Tables, versions: list[int], commands: pa.Table, keyed: Collection[str]) -> pa.Table:
    """Reads the sealed rows of the entries that commands of the kinds KINDS_WITH_PAYLOAD name, as MESSAGES.

    Of a recurring message only the last row of each subscription, and the one that it came with.

    Args:
        versions: those of the tables LOOKED_UP to read.
        commands: with the columns of `tracker.commands.schema.COMMAND_ROWS`.
        keyed: the topics that have had schedule keys.
    """
    commands = commands.filter(pc.is_in(commands["kind"], pa.array(KINDS_WITH_PAYLOAD)))
    wanted, keys = command_positions(commands), pc.unique(commands["schedule_key"].drop_null()).to_pylist()
    found = []
    sql = "SELECT * FROM delayed_index WHERE {} AND operation = 'DELAY'"
    if wanted.num_rows:
        # A moved row may be due at any time. The log tells which files have some.
        moved = tables.query("delayed_index", sql.format(f"sequence IS NOT NULL AND {near(wanted)}"), versions[0])
        came = _as_they_came(tables, versions, commands, keyed, MESSAGES)
        found += [came, of_entries(typed(moved, MESSAGES), wanted)]
    if keys:
        named = ", ".join(map(literal, keys))
        rows = tables.query("delayed_index", sql.format(f"schedule_key IN ({named})"), versions[0])
        topics = pa.array(pc.unique(commands["topic"]))
        found.append(typed(rows.filter(pc.is_in(rows["topic"], topics)), MESSAGES))
    return _last_occurrences(concat(found))


def _last_occurrences(rows: pa.Table) -> pa.Table:
    """Leaves out of MESSAGES the earlier occurrences of recurring messages: of each subscription the last row stays."""
    if not has_occurrences(rows):
        return rows
    last: dict[tuple[object, ...], int] = {}
    names = ("occurrence", "subscription", "ledger_id", "entry_id", "batch_index")
    sequences = pc.fill_null(rows["sequence"], 0).to_pylist()
    for i, (number, *key) in enumerate(zip(*(rows[name].to_pylist() for name in names), strict=True)):
        of = (i,) if number is None else tuple(key)
        if of not in last or sequences[last[of]] < sequences[i]:
            last[of] = i
    return rows.take(pa.array(sorted(last.values())))


def near(wanted: pa.Table) -> str:
    """SQL condition that holds for the wanted entries, and some others, and lets a reader skip most files."""
    of_ledger = wanted.group_by("ledger_id").aggregate([("entry_id", "min"), ("entry_id", "max")])
    if of_ledger.num_rows > _MAX_RANGES:
        ledgers = wanted["ledger_id"]
        return f"ledger_id BETWEEN {pc.min(ledgers)} AND {pc.max(ledgers)}"
    ranges = [
        f"(ledger_id = {row['ledger_id']} AND entry_id BETWEEN {row['entry_id_min']} AND {row['entry_id_max']})"
        for row in of_ledger.to_pylist()
    ]
    return f"({' OR '.join(ranges)})"


def to_index(messages: pa.Table, bucket_id: int) -> pa.Table:
    """Makes messages rows of type DELAY of the delayed index.

    Args:
        messages: as MESSAGES, those of one bucket.
        bucket_id: the bucket's.

    Returns:
        as DELAYED_INDEX, (messages,), in their order.
    """
    n = messages.num_rows
    extra = {
        "operation": pa.array(["DELAY"] * n, pa.string()),
        "bucket_id": pa.array([bucket_id] * n, pa.int64()),
    }
    columns = [extra[f.name] if f.name in extra else messages[f.name] for f in DELAYED_INDEX]
    return pa.table(columns, schema=DELAYED_INDEX)


def cancels_to_index(cancels: pa.Table, bucket_id: int) -> pa.Table:
    """Returns rows of a CANCEL or RESTORE in all the delayed index's columns: null in those that `cancels` lacks.

    Args:
        cancels: with `operation`, and no column that the delayed index does not have.
    """
    n = cancels.num_rows
    values = {
        "bucket_id": pa.array([bucket_id] * n, pa.int64()),
        **{name: cancels[name] for name in cancels.column_names},
    }
    columns = [values[f.name] if f.name in values else pa.nulls(n, f.type) for f in DELAYED_INDEX]
    return pa.table(columns, schema=DELAYED_INDEX)


def to_rejects(messages: pa.Table, tick: int) -> pa.Table:
    """Makes rejected messages rows of the table `rejects`.

    Args:
        messages: as MESSAGES, each with a `reason`.
        tick: in which they were rejected: their `batch_id`.

    Returns:
        as REJECTS, (messages,), in their order.
    """
    extra = {
        "position": position_texts(messages),
        "batch_id": pa.array([tick] * messages.num_rows, pa.int64()),
    }
    columns = [extra[f.name] if f.name in extra else messages[f.name] for f in REJECTS]
    return pa.table(columns, schema=REJECTS)


def outcomes_to_rows(outcomes: pa.Table, tick: int, now: int) -> pa.Table:
    """Returns OUTCOME_ROWS as rows of the table `outcomes`, but for repeated answers, which it has already.

    Args:
        now: when the commands are applied, ms since the epoch.
    """
    outcomes = where(outcomes, ~pc.fill_null(outcomes["is_repeat"], False).to_numpy())
    n = outcomes.num_rows
    names = [Result.Name(number) for number in range(len(Result.keys()))]
    values = {
        **{name: outcomes[name] for name in outcomes.column_names},
        "position": position_texts(outcomes),
        "result": pa.array(names).take(outcomes["result"].combine_chunks()),
        "command_hash": outcomes["body"],
        "applied_at": pa.array([now] * n, pa.int64()),
        "batch_id": pa.array([tick] * n, pa.int64()),
    }
    return pa.table([values[f.name] for f in OUTCOMES], schema=OUTCOMES)
