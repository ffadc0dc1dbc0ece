"""Finds the messages that were rejected while the rejects topic could not be written, in the table `rejects`."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from status.alerts import NOT_SEEN_REASON
from tracker.commands.outcomes import NOT_TAKEN
from tracker.messages import LEFT_OUT, MESSAGES, int64, typed
from tracker.packing import fitting
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries, Sql, all_of, none_of

_SQL = NamedQueries(__file__, not_seen=f"{NOT_SEEN_REASON}%", left_out=f"{LEFT_OUT}%", not_taken=f"%{NOT_TAKEN}%")

# The most rejects of a round: of one entry all of them are in one round, however many.
_MAX_ROWS = 5_000
ROUND_BYTES = 16 << 20  # about the most bytes of their payloads and properties, but for those of one entry


class RejectKey(NamedTuple):
    """The place of an entry's rejects among all rejects of a source topic: they are sent again in this order."""

    tick: int  # in which they were rejected
    ledger_id: int
    entry_id: int

    @classmethod
    def before_tick(cls, tick: int) -> RejectKey:
        """Returns the key after which the rejects of a tick begin."""
        return cls(tick, -2, -2)


class Span(NamedTuple):
    """Rejects of a source topic, from those after one key up to those with another one.

    Attributes:
        topic: the source topic.
        after: the key before the first.
        to: the key of the last; None: all that the version of the table has.
    """

    topic: str
    after: RejectKey
    to: RejectKey | None


class Round(NamedTuple):
    """What is sent again at a time.

    Attributes:
        to: the key of the last reject; None: these are all.
        n_bytes: of their payloads and properties.
    """

    to: RejectKey | None
    n_bytes: int


def find_round(tables: Tables, version: int, topic: str, after: RejectKey, most_bytes: int = ROUND_BYTES) -> Round:
    """Finds out how far the next round goes.

    Args:
        version: of the table `rejects`.
        topic: the source topic.
        after: the key of the last reject that has been sent again.
        most_bytes: about the most bytes of payloads and properties in the round, but for those of its first entry.
    """
    condition = _condition(Span(topic, after, None))
    unknown = _SQL("count_rejects", condition=all_of([condition, _SQL("has_unknown_size")]))
    # Payloads are read for their sizes only where an earlier version wrote some row.
    is_unknown = any(tables.query("rejects", unknown, version)["n"].to_pylist())
    size = _SQL("counted_size" if is_unknown else "known_size")
    entries = tables.query("rejects", _SQL("entries", condition=condition, size=size, most=_MAX_ROWS + 1), version)
    n = min(fitting(int64(entries, "n"), _MAX_ROWS), fitting(int64(entries, "n_bytes"), most_bytes))
    if not n:
        return Round(None, 0)
    # The properties of few are read.
    condition = _condition(Span(topic, after, _key(entries, n - 1)))
    size = _SQL("with_properties", size=size)
    first = tables.query("rejects", _SQL("entries", condition=condition, size=size, most=n), version)
    sizes = int64(first, "n_bytes")
    n = fitting(sizes, most_bytes)
    return Round(None if n == entries.num_rows else _key(first, n - 1), int(sizes[:n].sum()))


def _key(entries: pa.Table, i: int) -> RejectKey:
    return RejectKey(*(entries[name][i].as_py() for name in ("batch_id", "ledger_id", "entry_id")))


def find_rejects(tables: Tables, version: int, span: Span) -> pa.Table:
    """Finds the messages that go to a rejects topic now, as MESSAGES, in the order of their keys.

    Args:
        version: the version of the table `rejects` to read.
        span: which of them.
    """
    return typed(tables.query("rejects", _SQL("rejects", condition=_condition(span)), version), MESSAGES)


def _condition(span: Span) -> Sql:
    """Returns the SQL condition that a row is in a span, and goes to the rejects topic."""
    # Files and row groups are skipped by the ticks alone.
    conditions = [_SQL("in_topic", topic=span.topic, first=span.after.tick), _is_after(span.after)]
    if span.to is not None:
        conditions += [_SQL("until_tick", last=span.to.tick), none_of([_is_after(span.to)])]
    return all_of([*conditions, _SQL("goes_there")])


def _is_after(key: RejectKey) -> Sql:
    return _SQL("comes_after", tick=key.tick, ledger=key.ledger_id, entry=key.entry_id)
