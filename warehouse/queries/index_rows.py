"""Reads rows of the delayed index, by time for segments or by entry for commands, and makes the tables' rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.large_rows import LargeKey, LargeRule
from tracker.buckets.time_slots import SLOT_MILLIS
from tracker.commands.kinds import CANCELLING_KINDS, KINDS_WITH_PAYLOAD
from tracker.commands.match import command_positions
from tracker.keys.cold_keys import times_of
from tracker.keys.live_keys import KEYED
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.messages import (
    MESSAGES,
    BoolArray,
    Int64Array,
    concat,
    empty_table,
    has_occurrences,
    in_order,
    int64,
    is_among,
    of_entries,
    position_texts,
    typed,
    where,
    with_columns,
)
from tracker.packing import parts_of_sizes
from tracker.schemas import KNOWN, PAST
from tracker.wire.delaylake_pb2 import Result
from warehouse.delta.tables import Tables, ranges_of
from warehouse.named_queries import ALL, FALSE, TRUE, NamedQueries, Sql, all_of, columns, in_ranges, none_of, some_of
from warehouse.pending import effects_of
from warehouse.schemas import DELAYED_INDEX, OUTCOMES, REJECTS

# The tables that a command needs: for the messages that it names, and for its first answer if it is repeated.
LOOKED_UP = ["delayed_index", "entries", "outcomes"]

_SQL = NamedQueries(__file__, slot_millis=SLOT_MILLIS, held=HELD_DELIVER_AT)
_ENTRY = ["ledger_id", "entry_id"]
MAX_LARGE_ROWS = 50_000
PART_BYTES = 16 << 20  # of payloads, which `read_places` reads at a time
_UNKNOWN_BYTES = 16 << 10  # of a payload for which the table has no size: there is none, or an earlier version wrote it

# Where rows of the delayed index are, without what may be large.
PLACES = pa.schema(
    [
        *(
            MESSAGES.field(name)
            for name in (
                *("topic", "ledger_id", "entry_id", "batch_index", "batch_size", "deliver_at", "subscription"),
                *("sequence", "was_due", "occurrence"),
            )
        ),
        ("payload_bytes", pa.int64()),
    ]
)
_MAX_RANGES = 50


def rows_due(tables: Tables, version: int, start: int, end: int) -> list[tuple[int, int]]:
    """Counts the DELAY rows of a version of the delayed index that are due in [start, end), ms since the epoch.

    Returns:
        (time slot, number of rows) of each slot that has rows, ascending; a slot is deliver_at / SLOT_MILLIS.
    """
    counts = tables.query("delayed_index", _SQL("rows_due", start=start, end=end), version)
    return list(zip(counts["slot"].to_pylist(), counts["n"].to_pylist(), strict=True))


def read_segment(tables: Tables, version: int, start: int, end: int) -> pa.Table:
    """Reads the DELAY rows of a version of the delayed index that are due in [start, end), ms since the epoch.

    Returns:
        the rows, as MESSAGES.
    """
    return _rows(tables, version, _SQL("delay_due_in", start=start, end=end))


def read_light_segment(tables: Tables, version: int, start: int, end: int, rule: LargeRule) -> pa.Table:
    """Reads what `read_segment` reads, except rows that are large by a rule."""
    if not rule.n_bytes:
        return read_segment(tables, version, start, end)
    span = _SQL("delay_due_in", start=start, end=end)
    return _rows(tables, version, all_of([span, none_of([_is_large(tables, version, span, rule)])]))


def large_rule(tables: Tables, n_bytes: int, in_order: Sequence[str], version: int, start: int, end: int) -> LargeRule:
    """Returns which rows of a version of the delayed index wait for room, where none waits so far.

    Args:
        n_bytes: of a large row's payload, at least.
        in_order: source topics of which messages come in the order of keys.
        version: of the delayed index.
        start, end: rows due from `start` to before `end`, ms since the epoch, are to be loaded.
    """
    with_large: list[str] = []
    if in_order and start < end:
        span = _SQL("delay_due_in", start=start, end=end)
        condition = all_of([span, _SQL("in_topics", topics=in_order)])
        if _count(tables, version, condition):
            size = _size(tables, version, span)
            sql = _SQL("topics_with_large", condition=condition, size=size, n_bytes=n_bytes)
            with_large = tables.query("delayed_index", sql, version)["topic"].to_pylist()
    others = tuple(topic for topic in in_order if topic not in with_large)
    return LargeRule(n_bytes, others, is_whole=True, in_order=tuple(sorted(with_large)))


def large_due(tables: Tables, version: int, rule: LargeRule, after: LargeKey, end: int) -> list[tuple[LargeKey, int]]:
    """Returns the keys and bytes of large rows of a version of the delayed index, ascending, MAX_LARGE_ROWS at most.

    Args:
        rule: which rows are large.
        after: the rows come after this key.
        end: they are due before this time, ms since the epoch.
    """
    if not rule.n_bytes:
        return []
    span = _SQL("delay_due_in", start=after[0], end=end)
    condition = all_of([span, _is_after(after), _is_large(tables, version, span, rule)])
    if not _count(tables, version, condition):
        return []
    size = _size(tables, version, span)
    sql = _SQL("large_due", condition=condition, size=size, max_large_rows=MAX_LARGE_ROWS)
    found = tables.query("delayed_index", sql, version)
    columns = (found[name].to_pylist() for name in ("deliver_at", "ledger_id", "entry_id", "n"))
    return [((due, ledger, entry), n) for due, ledger, entry, n in zip(*columns, strict=True)]


class LargeWaiting(NamedTuple):
    """The rows of a source topic that wait for room in a version of the delayed index.

    Attributes:
        topic: the source topic.
        messages: their number; cancelled ones are among them.
        n_bytes: of their payloads.
        since: when the first of them was due, ms since the epoch.
    """

    topic: str
    messages: int
    n_bytes: int
    since: int


def large_waiting(tables: Tables, version: int, rule: LargeRule, after: LargeKey, end: int) -> list[LargeWaiting]:
    """Counts the large rows of a version of the delayed index that `large_due` would return, by source topic."""
    span = _SQL("delay_due_in", start=after[0], end=end)
    condition = all_of([span, _is_after(after), _is_large(tables, version, span, rule)])
    sql = _SQL("large_waiting", condition=condition, size=_size(tables, version, span))
    return [LargeWaiting(**row) for row in tables.query("delayed_index", sql, version).to_pylist()]


def read_large(tables: Tables, version: int, rule: LargeRule, after: LargeKey, to: LargeKey) -> pa.Table:
    """Reads the large rows of a version of the delayed index, as MESSAGES, after one key and up to another one."""
    conditions = [_SQL("delay_due_up_to", first=after[0], last=to[0])]
    if after[0] == to[0]:
        conditions.append(_SQL("between_ledgers", first=after[1], last=to[1]))
        if after[1] == to[1]:
            conditions.append(_SQL("entries_after", first=after[2], last=to[2]))
    is_large = _is_large(tables, version, all_of(conditions), rule)
    return _rows(tables, version, all_of([*conditions, _is_after(after), none_of([_is_after(to)]), is_large]))


def _rows(tables: Tables, version: int, condition: Sql) -> pa.Table:
    """Reads the rows of a version of the delayed index for which a condition holds, as MESSAGES."""
    return typed(tables.query("delayed_index", _SQL("index_rows", columns=ALL, condition=condition), version), MESSAGES)


def _is_after(key: LargeKey) -> Sql:
    """Returns the SQL condition that a row comes after a key."""
    due, ledger, entry = key
    return _SQL("comes_after", due=due, ledger=ledger, entry=entry)


def _is_large(tables: Tables, version: int, span: Sql, rule: LargeRule) -> Sql:
    """Returns the SQL condition that rows of a span, a condition, are loaded in turn; it is never null."""
    others = [none_of([_SQL("in_topics", topics=rule.others)])] if rule.others else []
    if not rule.is_whole:
        others.append(_SQL("is_ordinary"))
    return _SQL(
        "is_large",
        size=_size(tables, version, span),
        n_bytes=rule.n_bytes,
        is_other=all_of(others),
        is_in_order=_SQL("in_topics", topics=rule.in_order) if rule.in_order else FALSE,
    )


def _size(tables: Tables, version: int, span: Sql) -> Sql:
    """Returns SQL for the bytes of a payload; payloads are read for it only where an earlier version wrote some row."""
    is_unknown = _count(tables, version, all_of([span, _SQL("has_unknown_size")]))
    return _SQL("counted_size" if is_unknown else "known_size")


def _count(tables: Tables, version: int, condition: Sql) -> int:
    """Counts the rows of a version of the delayed index for which a condition holds."""
    counts = tables.query("delayed_index", _SQL("count_index_rows", condition=condition), version)
    return sum(counts["n"].to_pylist())


def find_known_messages(tables: Tables, versions: list[int], commands: pa.Table, keyed: Collection[str]) -> pa.Table:
    """Finds the durable messages of the entries that commands name.

    A durable entry that is in no bucket was dispatched without being sealed: it has one row here, with deliver_at 0.

    Args:
        versions: the versions of the tables LOOKED_UP to read.
        commands: the commands, as COMMAND_ROWS.
        keyed: the topics that have had schedule keys.

    Returns:
        the messages, as KNOWN.
    """
    came = _as_they_came(tables, versions, commands, keyed, KNOWN)
    missing = command_positions(commands).join(came.select(_ENTRY), _ENTRY, join_type="left anti", use_threads=False)
    not_sealed = empty_table(KNOWN)
    if missing.num_rows:
        sql = _SQL("entries_as_known", near=near_entries(missing))
        not_sealed = of_entries(typed(tables.query("entries", sql, versions[1]), KNOWN), missing)
    keys = _keys_of_never_sealed(tables, versions, came, not_sealed, keyed)
    return concat([came, where(not_sealed, ~is_among(not_sealed, keys, _ENTRY)), keys], KNOWN)


def _keys_of_never_sealed(
    tables: Tables, versions: list[int], came: pa.Table, not_sealed: pa.Table, keyed: Collection[str]
) -> pa.Table:
    """Finds messages with schedule keys that were parked, moved or superseded before they were sealed as they came.

    The rows of their moves, or their outcomes, have their keys, and so tell which shards know what became of them.

    Args:
        versions: the versions of the tables LOOKED_UP to read.
        came: as KNOWN: the messages that were sealed as they came, of entries that commands name.
        not_sealed: as KNOWN: a row for each other entry.
        keyed: the topics that have had schedule keys.

    Returns:
        the messages, as KNOWN, due at PAST.
    """
    entry = ["topic", *_ENTRY]
    with_size = [*entry, "batch_size"]
    sizes = came.group_by(with_size).aggregate([("batch_index", "count")])
    in_part = sizes.filter(pc.less(sizes["batch_index_count"], sizes["batch_size"]))
    entries = pa.concat_tables(rows.select(with_size) for rows in (in_part, not_sealed))
    entries = entries.filter(pc.is_in(entries["topic"], pa.array(sorted(keyed), pa.string())))
    if not entries.num_rows:
        return empty_table(KNOWN)
    position = [*entry, "partition", "batch_index", "schedule_key"]
    read, near = columns(position), near_entries(entries)
    moved = tables.query("delayed_index", _SQL("moved_rows", columns=read, near=near), versions[0])
    superseded = tables.query("outcomes", _SQL("superseded", columns=read, near=near), versions[2])
    rows = pa.concat_tables(typed(rows, KNOWN).select(position) for rows in (moved, superseded))
    rows = rows.filter(pc.is_valid(rows["schedule_key"])).group_by(position).aggregate([])
    rows = rows.join(entries, entry, join_type="inner", use_threads=False)
    rows = where(rows, ~is_among(rows, came, [*_ENTRY, "batch_index"]))
    return typed(rows.append_column("deliver_at", pa.repeat(PAST, rows.num_rows)), KNOWN)


def _as_they_came(
    tables: Tables, versions: list[int], commands: pa.Table, keyed: Collection[str], schema: pa.Schema
) -> pa.Table:
    """Reads the sealed first rows, not those of moves, of the entries that commands name.

    It looks by time first, which the commands name or else `entries` has: the index is sorted by time, while an entry
    may be in any merged file. With a hundred million rows that takes milliseconds instead of seconds.

    Args:
        versions, commands, keyed: as for `find_known_messages`.
        schema: KNOWN or PLACES.

    Returns:
        the rows, as the schema says.
    """
    wanted = command_positions(commands)
    read = columns(name for name in schema.names if name in DELAYED_INDEX.names)
    found: list[pa.Table] = []

    def look_up(condition: Sql) -> pa.Table:
        conditions = all_of([condition, near_entries(wanted), _SQL("as_it_came")])
        sql = _SQL("index_rows", columns=read, condition=conditions)
        return of_entries(typed(tables.query("delayed_index", sql, versions[0]), schema), wanted)

    def find_by_time(first: Int64Array, last: Int64Array, are_only_there: pa.Table) -> pa.Table:
        """Adds rows of wanted entries in some spans of time to `found`; returns the entries not found in full.

        Args:
            first, last: begin and end of each span, inclusive, ms since the epoch, int64, (spans,).
            are_only_there: entries that have no messages outside these spans.
        """
        ranges = _covering(first, last)
        if not ranges:
            return wanted
        rows = look_up(in_ranges("deliver_at", ranges))
        # The messages of an entry may be due at different times, so an entry is found only with all of its messages.
        sizes = rows.group_by(_ENTRY).aggregate([("batch_size", "max"), ("batch_index", "count")])
        whole = sizes.filter(pc.greater_equal(sizes["batch_index_count"], sizes["batch_size_max"])).select(_ENTRY)
        done = pa.concat_tables([whole, are_only_there])
        found.append(of_entries(rows, done))
        return wanted.join(done, _ENTRY, join_type="left anti", use_threads=False)

    kinds = pc.is_in(commands["kind"], pa.array(CANCELLING_KINDS))
    named = int64(commands.filter(pc.and_(kinds, pc.greater(commands["deliver_at"], 0))), "deliver_at")
    wanted = find_by_time(named, named, wanted.slice(0, 0))
    if wanted.num_rows:
        times = _times_of(tables, versions[1], wanted)
        # A message with a schedule key may be due sooner than `entries` says: its key may not be put off that long.
        are_only_there = times.filter(pc.invert(pc.is_in(times["topic"], pa.array(sorted(keyed), pa.string()))))
        wanted = find_by_time(int64(times, "first_due"), int64(times, "last_due"), are_only_there.select(_ENTRY))
    if wanted.num_rows:
        found.append(look_up(TRUE))
    return concat(found, schema)


def _times_of(tables: Tables, version: int, wanted: pa.Table) -> pa.Table:
    """Returns when the first and the last message of wanted entries are due, for those where `entries` has it.

    Returns:
        columns topic, ledger_id, entry_id, and first_due and last_due, ms since the epoch.
    """
    sql = _SQL("times_of_entries", near=near_entries(wanted))
    return of_entries(tables.query("entries", sql, version), wanted)


def _covering(first: Int64Array, last: Int64Array) -> list[tuple[int, int]]:
    """Covers spans of time, both ends inclusive, int64, (spans,), by at most _MAX_RANGES without the widest gaps."""
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
    """Reads the sealed first rows of messages with some schedule keys, as KEYED; there may be rows of other keys, too.

    Args:
        version: the version of the delayed index to read.
        names: (topic, key) of each schedule key.
        groups: numbers of the time groups in which the messages are due, ascending; see GROUP_MILLIS of `cold_keys`.
    """
    ranges = [times_of(pair) for pair in ranges_of(groups, _MAX_RANGES)]
    sql = _SQL(
        "keyed_messages",
        columns=columns(KEYED.names),
        in_times=in_ranges("deliver_at", ranges),
        topics=sorted({topic for topic, _ in names}),
        keys=sorted({key for _, key in names}),
    )
    return typed(tables.query("delayed_index", sql, version), KEYED)


def in_index_or_not_durable(tables: Tables, versions: list[int], rows: pa.Table, after: int) -> BoolArray:
    """Returns a mask of the rows whose entry is not durable yet, or has a message in the index due after a time.

    Args:
        versions: the versions of the tables LOOKED_UP to read.
        rows: columns ledger_id and entry_id.
        after: the time, ms since the epoch.

    Returns:
        bool, (rows,).
    """
    near = near_entries(rows)
    waiting = tables.query("delayed_index", _SQL("waiting_entries", near=near, after=after), versions[0])
    durable = tables.query("entries", _SQL("durable_entries", near=near), versions[1])
    return is_among(rows, waiting, _ENTRY) | ~is_among(rows, durable, _ENTRY)


def find_places(tables: Tables, versions: list[int], commands: pa.Table, keyed: Collection[str]) -> pa.Table:
    """Finds the sealed rows of the entries that commands of the kinds KINDS_WITH_PAYLOAD name; reads no payloads.

    For a recurring message only its first row and the last one of each subscription.

    Args:
        versions: the versions of the tables LOOKED_UP to read.
        commands: the commands, as COMMAND_ROWS.
        keyed: the topics that have had schedule keys.

    Returns:
        the rows, as PLACES: those as they came first, each in the order in which they are due.
    """
    commands = commands.filter(pc.is_in(commands["kind"], pa.array(KINDS_WITH_PAYLOAD)))
    wanted, keys = command_positions(commands), pc.unique(commands["schedule_key"].drop_null()).to_pylist()
    found = []
    if wanted.num_rows:
        sql = _SQL("moved_rows", columns=columns(PLACES.names), near=near_entries(wanted))
        moved = tables.query("delayed_index", sql, versions[0])
        came = _as_they_came(tables, versions, commands, keyed, PLACES)
        found += [came, of_entries(typed(moved, PLACES), wanted)]
    if keys:
        sql = _SQL("rows_with_keys", columns=columns(PLACES.names), keys=keys)
        rows = tables.query("delayed_index", sql, versions[0])
        topics = pa.array(pc.unique(commands["topic"]))
        found.append(typed(rows.filter(pc.is_in(rows["topic"], topics)), PLACES))
    places = in_order(_last_occurrences(concat(found, PLACES)))
    is_first = pc.is_null(places["sequence"])
    places = concat([places.filter(is_first), places.filter(pc.invert(is_first))], PLACES)
    return with_columns(places, payload_bytes=pc.fill_null(places["payload_bytes"], _UNKNOWN_BYTES))


def read_places(tables: Tables, version: int, places: pa.Table) -> Iterator[pa.Table]:
    """Reads rows of a version of the delayed index, as MESSAGES, in parts of about PART_BYTES of payloads.

    The same rows come in the same order whenever they are read.

    Args:
        version: of the delayed index.
        places: as `find_places` returns them.
    """
    for part in parts_of_sizes(places, int64(places, "payload_bytes"), PART_BYTES):
        due = int64(part, "deliver_at")
        conditions = [in_ranges("deliver_at", _covering(due, due)), near_entries(part), _SQL("is_delay")]
        conditions.append(_among_entries(part))  # the payloads of rows between them are not read
        rows = _rows(tables, version, all_of(conditions))
        # A message's rows differ by the move that made them.
        rows = where(rows, is_among(_with_moves(rows), _with_moves(part), [*_ENTRY, "batch_index", "sequence"]))
        order = _with_moves(rows).append_column("subscription", rows["subscription"])
        by = [(name, "ascending") for name in ("sequence", *_ENTRY, "batch_index", "subscription")]
        yield rows.take(pc.sort_indices(order, sort_keys=by))


def _among_entries(rows: pa.Table) -> Sql:
    """Returns the SQL condition of being one of the rows' entries; with many ledgers, of having one's two numbers."""
    entries = rows.group_by("ledger_id").aggregate([("entry_id", "distinct")])
    if entries.num_rows <= _MAX_RANGES:
        return some_of(
            _SQL("is_entry_among", ledger=one["ledger_id"], entries=one["entry_id_distinct"])
            for one in entries.to_pylist()
        )
    ledgers, numbers = entries["ledger_id"].to_pylist(), pc.unique(rows["entry_id"]).to_pylist()
    return _SQL("may_be_entry", ledgers=ledgers, entries=numbers)


def _with_moves(rows: pa.Table) -> pa.Table:
    """Returns rows, MESSAGES or PLACES, with sequence -1 where it is null."""
    moves = pc.fill_null(rows["sequence"], -1)
    return rows.select([*_ENTRY, "batch_index"]).append_column("sequence", moves)


def _last_occurrences(rows: pa.Table) -> pa.Table:
    """Returns PLACES with only the last row of each recurring message and subscription."""
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


def near_entries(wanted: pa.Table) -> Sql:
    """Returns a wider SQL condition than being one of the wanted entries, with which a reader skips most files."""
    ledgers = wanted.group_by("ledger_id").aggregate([("entry_id", "min"), ("entry_id", "max")])
    if ledgers.num_rows > _MAX_RANGES:
        first, last = pc.min_max(wanted["ledger_id"]).as_py().values()
        return _SQL("between_ledgers", first=first, last=last)
    return some_of(
        _SQL("between_entries", ledger=row["ledger_id"], first=row["entry_id_min"], last=row["entry_id_max"])
        for row in ledgers.to_pylist()
    )


def to_index(messages: pa.Table, bucket_id: int) -> pa.Table:
    """Makes DELAY rows of the delayed index.

    Args:
        messages: the messages of one bucket, as MESSAGES.
        bucket_id: the bucket's id.

    Returns:
        a row for each message, in the same order, as DELAYED_INDEX.
    """
    n = messages.num_rows
    extra = {
        "payload_bytes": pc.binary_length(messages["payload"]).cast(pa.int64()),
        "operation": pa.array(["DELAY"] * n, pa.string()),
        "bucket_id": pa.array([bucket_id] * n, pa.int64()),
    }
    columns = [extra[f.name] if f.name in extra else messages[f.name] for f in DELAYED_INDEX]
    return pa.table(columns, schema=DELAYED_INDEX)


def cancels_to_index(cancels: pa.Table, bucket_id: int) -> pa.Table:
    """Completes CANCEL and RESTORE rows to all columns of the delayed index; those that `cancels` lacks are null.

    Args:
        cancels: the rows, with `operation` and other columns of the delayed index.
        bucket_id: the id of the bucket with which they are written.
    """
    n = cancels.num_rows
    values = {
        "bucket_id": pa.array([bucket_id] * n, pa.int64()),
        **{name: cancels[name] for name in cancels.column_names},
    }
    columns = [values[f.name] if f.name in values else pa.nulls(n, f.type) for f in DELAYED_INDEX]
    return pa.table(columns, schema=DELAYED_INDEX)


def to_rejects(messages: pa.Table, tick: int) -> pa.Table:
    """Makes rows of the table `rejects`.

    Args:
        messages: the rejected messages, as MESSAGES, each with a `reason`.
        tick: the tick in which they were rejected.

    Returns:
        a row for each message, in the same order, as REJECTS.
    """
    extra = {
        "position": position_texts(messages),
        "batch_id": pa.array([tick] * messages.num_rows, pa.int64()),
        "payload_bytes": pc.binary_length(messages["payload"]).cast(pa.int64()),
    }
    columns = [extra[f.name] if f.name in extra else messages[f.name] for f in REJECTS]
    return pa.table(columns, schema=REJECTS)


def outcomes_to_rows(outcomes: pa.Table, tick: int, now: int) -> pa.Table:
    """Makes rows of the table `outcomes`, without repeated answers, which it has already.

    Args:
        outcomes: the outcomes, as OUTCOME_ROWS.
        tick: the tick of the commands.
        now: when the commands are applied, ms since the epoch.
    """
    outcomes = where(outcomes, ~pc.fill_null(outcomes["is_repeat"], False).to_numpy())
    n = outcomes.num_rows
    names = [Result.Name(number) for number in range(len(Result.keys()))]
    result = pa.array(names).take(outcomes["result"].combine_chunks())
    values = {
        **{name: outcomes[name] for name in outcomes.column_names},
        "position": position_texts(outcomes),
        "result": result,
        "effect": effects_of(pa.table({"result": result, "operation": outcomes["operation"]})),
        "command_hash": outcomes["body"],
        "applied_at": pa.array([now] * n, pa.int64()),
        "batch_id": pa.array([tick] * n, pa.int64()),
    }
    return pa.table([values[f.name] for f in OUTCOMES], schema=OUTCOMES)
