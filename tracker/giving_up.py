"""Messages whose destination can't be written: which are parked, and which are given up and rejected."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import CANCEL, SKIP_NEXT
from tracker.commands.outcomes import ISSUED_BY, NOT_DELIVERED
from tracker.context import Context
from tracker.in_flight import REJECTED, OpenReleases
from tracker.messages import MESSAGES, Int64Array, concat, empty_table, has_occurrences, typed, where, with_columns
from tracker.schemas import NOT_DELIVERED_ID, OUTCOME_ROWS
from tracker.subscriptions import dead_letters_of, without_dead_letters
from tracker.wire.delaylake_pb2 import Result

# As `tracker.tick.Tick.unwritable`.
Unwritable = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class GivenUp:
    """Messages that are given up.

    Attributes:
        rejects: as MESSAGES: a row for each message and subscription, with the reason.
        outcomes: as OUTCOME_ROWS: a row for each of them: the message is cancelled for the subscription.
    """

    rejects: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    outcomes: pa.Table = field(default_factory=partial(empty_table, OUTCOME_ROWS))


class GivingUp:
    """Gives up messages for those unwritable subscriptions whose due messages are rejected.

    Args:
        context: of the shard, in a tick.
        unwritable: as in `tracker.tick.Tick`.
    """

    def __init__(self, context: Context, unwritable: Unwritable) -> None:
        self._context = context
        self._reasons: dict[str, dict[int, tuple[str, str]]] = {}  # by topic and number: name, reason
        for topic, destinations in unwritable.items():
            for number, name in enumerate(context.subscriptions.names.get(topic, ())):
                if reason := destinations.get(name, {}).get("rejects"):
                    self._reasons.setdefault(topic, {})[number] = name, reason

    def select_given_up(self, open_releases: OpenReleases) -> OpenReleases:
        """Returns the part of open releases that is given up: only the bits of these subscriptions."""
        masks = {topic: sum(1 << number for number in numbers) for topic, numbers in self._reasons.items()}
        return {
            release: {topic: bits & masks[topic] for topic, bits in topics.items() if bits & masks.get(topic, 0)}
            for release, topics in open_releases.items()
        }

    def reject_rows(self, rows: pa.Table, masks: Int64Array) -> tuple[GivenUp, Int64Array]:
        """Rejects due rows for these subscriptions.

        Args:
            rows: as MESSAGES.
            masks: int64, (rows,): the subscriptions to which each row would go, as bits.

        Returns:
            the messages that are given up, and `masks` without the subscriptions for which they are.
        """
        rejects, outcomes = [], []
        if self._reasons and rows.num_rows:
            masks = masks.copy()
            topics = rows["topic"].to_numpy(zero_copy_only=False)
            for topic, numbers in self._reasons.items():
                for number, (name, reason) in numbers.items():
                    chosen = (topics == topic) & (masks >> number & 1 > 0)
                    if chosen.any():
                        masks[chosen] &= ~(1 << number)
                        found = typed(where(rows, chosen), MESSAGES)
                        reason = f"{NOT_DELIVERED}{name}: {reason}"
                        rejects.append(rejected(found, reason))
                        sequence = self._context.next_sequence()
                        now = self._context.now
                        outcomes.append(cancelled(found, name, reason, sequence, self._context.tick, now))
        return GivenUp(concat(rejects), concat(outcomes, OUTCOME_ROWS)), masks


def cancelled(rows: pa.Table, name: str, reason: str, sequence: int, tick: int, now: int) -> pa.Table:
    """Builds outcomes that cancel messages for a subscription.

    Args:
        rows: as MESSAGES.
        name: the subscription's name.
        reason: one line.
        sequence: of all outcomes (see `tracker.schemas.SEQUENCE_BITS`).
        tick: the tick's number, which becomes part of the request id.
        now: ms since the epoch.

    Returns:
        as OUTCOME_ROWS: a row for each of the rows.
    """
    n = rows.num_rows
    constants: dict[str, Any] = {
        "request_id": f"{NOT_DELIVERED_ID}{tick}",
        "subscription": name,
        "result": int(Result.APPLIED),
        "reason": reason,
        "operation": CANCEL.upper(),
        "sequence": sequence,
        "issued_by": ISSUED_BY,
        "issued_at": now,
        "sum_up": True,
    }
    values = {field: pa.array([value] * n) for field, value in constants.items()}
    if has_occurrences(rows):
        # Of a recurring message only this occurrence is cancelled; the following ones are still to come.
        recurs = pc.is_valid(rows["occurrence"])
        since = pc.coalesce(rows["occurrence_at"], rows["deliver_at"])
        values["operation"] = pc.if_else(recurs, SKIP_NEXT.upper(), CANCEL.upper())
        values |= {"occurrence": rows["occurrence"], "deliver_at": pc.if_else(recurs, since, None)}
    values |= {field: rows[field] for field in ("topic", "partition", "ledger_id", "entry_id", "batch_index")}
    return typed(values, OUTCOME_ROWS)


def rejected(rows: pa.Table, reason: str) -> pa.Table:
    """Returns rows of one subscription, as MESSAGES, as they are rejected for it."""
    n = rows.num_rows
    nothing = {"subscription": pa.nulls(n, pa.string()), "sequence": pa.nulls(n, pa.int64())}
    return with_columns(rows, reason=pa.array([reason] * n), was_due=pa.nulls(n, pa.int64()), **nothing)


Names = Mapping[str, Sequence[str]]  # by topic: the names of its subscriptions, by number


def parked_subscriptions(unwritable: Unwritable, names: Names) -> dict[str, int]:
    """Returns by topic, as bits, the unwritable subscriptions whose due messages are parked instead of rejected."""
    return {
        topic: sum(_bit(names, topic, name) for name, one in destinations.items() if name and "rejects" not in one)
        for topic, destinations in unwritable.items()
    }


def slow_subscriptions(unwritable: Unwritable, names: Names) -> dict[str, int]:
    """Returns by topic, as bits, the subscriptions that get in rounds what is parked for them: see `Tick.drains`."""
    return {
        topic: sum(_bit(names, topic, name) for name, one in destinations.items() if name and "round" in one)
        for topic, destinations in unwritable.items()
    }


def find_open_releases(unwritable: Unwritable, names: Names) -> OpenReleases:
    """Returns the releases that have not arrived at some destination, with the subscriptions as bits."""
    return _releases(unwritable, names, "open")


def find_recalled_releases(unwritable: Unwritable, names: Names) -> OpenReleases:
    """Returns the releases of which nothing was sent to some destination, with the subscriptions as bits."""
    return _releases(unwritable, names, "recalled")


def _releases(unwritable: Unwritable, names: Names, key: str) -> OpenReleases:
    found: dict[tuple[int, int], dict[str, int]] = {}
    for topic, destinations in unwritable.items():
        for name, one in destinations.items():
            subscription, is_dead = without_dead_letters(name)
            bit = _bit(names, topic, subscription) if name else REJECTED
            of = dead_letters_of(topic) if is_dead else topic
            for tick, kind in one.get(key, ()):
                release = found.setdefault((tick, kind), {})
                release[of] = release.get(of, 0) | bit
    return found


def select_sent_rejects(unwritable: Unwritable, parked: Collection[str], rejects: pa.Table) -> pa.Table:
    """Returns the rejects that go to their topic at once; the others go only to the table `rejects` for now.

    Args:
        unwritable, parked: as `unwritable` and `parked_rejects` in `tracker.tick.Tick`.
        rejects: as MESSAGES.
    """
    topics = sorted({*parked, *(topic for topic, destinations in unwritable.items() if "" in destinations)})
    return rejects.filter(pc.invert(pc.is_in(rejects["topic"], pa.array(topics, pa.string())))) if topics else rejects


def _bit(names: Names, topic: str, name: str) -> int:
    destinations = list(names.get(topic, ()))
    return 1 << destinations.index(name) if name in destinations else 0
