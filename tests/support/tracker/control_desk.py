"""A control of commands on a store of its own, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from tests.support.tracker.messages import TOPIC, Answers, batches, commands, messages
from tracker.commands.apply import Control
from tracker.commands.match import Named
from tracker.commands.occurrences import Occurrences
from tracker.context import Context
from tracker.message_state.changes import Compression
from tracker.message_state.parking import Parking
from tracker.message_state.state import MessageState
from tracker.messages import MESSAGES, BoolArray, Int64Array
from tracker.rebuilt import Rebuilt
from tracker.schemas import KNOWN, OUTCOME_ROWS, PauseChange
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions

SUBSCRIPTIONS = {TOPIC: ["a", "b"]}
TICK_MILLIS = 1_000

NOTHING = KNOWN.empty_table()

# One message alone in its entry, due at 50,000, and a batch of three.
ALONE = messages([(1, 7, 50_000)])
BATCH = batches([(1, 8, i, 3, 50_000 + i) for i in range(3)])


class Desk:
    """A control on a store, with the parts of a shard that it needs, in a tick that passes on by `at`."""

    def __init__(
        self,
        compression: Compression | None = None,
        subscriptions: Subscriptions | Mapping[str, Sequence[str]] = SUBSCRIPTIONS,
    ) -> None:
        self.compression = compression
        self.answers = Answers()
        self.open(subscriptions, MemoryStore())
        self.at(1, 1_000)

    def open(
        self,
        subscriptions: Subscriptions | Mapping[str, Sequence[str]] = SUBSCRIPTIONS,
        store: MemoryStore | None = None,
    ) -> None:
        """Begins with what the store has, in the same tick."""
        if store is not None:
            self.store = store
            self.context = Context(store, Subscriptions.from_names(subscriptions), tick_time_millis=TICK_MILLIS)
        else:
            last = self.context
            self.context = Context(self.store, Subscriptions.from_names(subscriptions), tick_time_millis=TICK_MILLIS)
            self.context.begin_tick(last.tick, last.now, last.cutoff, last.released, last.ingested_through)
        self.state = MessageState(self.context, self.compression)
        self.parking = Parking(self.context, self.state)
        self.occurrences = Occurrences(self.context, self.state)
        self.control = Control(self.context, self.state, self.occurrences)

    def at(self, tick: int, released: int, ingested_through: int | None = None, now: int | None = None) -> Desk:
        """`ingested_through`: up to which tick's commands what was published before them is in; else this tick's."""
        through = tick if ingested_through is None else ingested_through
        self.context.begin_tick(tick, released if now is None else now, released, released, through)
        return self

    def save(self) -> None:
        self.state.save()
        self.occurrences.save()
        self.control.save()

    def restart(self) -> None:
        self.save()
        self.open()

    def rebuild(self, rebuilt: Rebuilt) -> None:
        self.state.rebuild(rebuilt)
        self.occurrences.rebuild(rebuilt.occurrences)
        self.control.rebuild(rebuilt.waiting, rebuilt.request_ids)

    def apply(self, *rows: dict[str, object], known: pa.Table = NOTHING, is_new: bool = False) -> list[tuple[str, int]]:
        """(subscription, result) of each outcome."""
        return results(self.outcomes(*rows, known=known, is_new=is_new))

    def outcomes(
        self,
        *rows: dict[str, object],
        known: pa.Table = NOTHING,
        is_new: bool = False,
        pause_changes: Sequence[PauseChange] = (),
        waiting_outcomes: pa.Table = OUTCOME_ROWS.empty_table(),  # noqa: B008
    ) -> pa.Table:
        ids = {str(row["request_id"]): int(str(row["body"])) for row in reversed(rows)}
        published = self.publish(
            commands(rows),
            ids,
            known,
            np.full(known.num_rows, is_new),
            pause_changes=pause_changes,
            waiting_outcomes=waiting_outcomes,
        )
        self.answers.keep(published, self.context.tick)
        return published

    def publish(
        self,
        rows: pa.Table,
        request_ids: dict[str, int],
        known: pa.Table = NOTHING,
        is_new: BoolArray | None = None,
        *,
        payload_rows: pa.Table = MESSAGES.empty_table(),  # noqa: B008
        pause_changes: Sequence[PauseChange] = (),
        waiting_outcomes: pa.Table = OUTCOME_ROWS.empty_table(),  # noqa: B008
    ) -> pa.Table:
        """What a tick with these commands answers, as OUTCOME_ROWS."""
        known = known.select(KNOWN.names)
        named = Named(known, self.context.are_dispatched(known, is_new), payload_rows)
        repeats = self.control.find_repeats(rows, request_ids, self.answers)
        if repeats is None:
            return OUTCOME_ROWS.empty_table()
        self.parking.change_pauses(change for change in pause_changes if change.request_id not in repeats.known)
        return self.control.apply_commands(rows, named, repeats, waiting_outcomes)

    def arrive(self, rows: pa.Table) -> list[tuple[str, int]]:
        published = self.control.apply_waiting(rows)
        self.answers.keep(published, self.context.tick)
        return results(published)

    def expire(self) -> list[tuple[str, int]]:
        published = self.control.expire_waiting()
        self.answers.keep(published, self.context.tick)
        return results(published)

    def choose_subscriptions(self, rows: pa.Table) -> Int64Array:
        """The subscriptions to which due rows go, after what is parked is."""
        return self.parking.park_due(rows, self.parking.choose_subscriptions(rows))

    def subscription_mask(self, rows: pa.Table) -> list[int]:
        masks: list[int] = self.state.subscription_masks(rows).tolist()
        return masks


def results(outcomes: pa.Table) -> list[tuple[str, int]]:
    return list(zip(outcomes["subscription"].to_pylist(), outcomes["result"].to_pylist(), strict=True))


def apply_to_batch(desk: Desk, rows: Iterable[dict[str, object]], known: pa.Table = BATCH) -> list[tuple[int, int]]:
    """(batch index, result) of each outcome."""
    rows = list(rows)
    ids = {str(row["request_id"]): 1 for row in rows}
    outcomes = desk.publish(commands(rows), ids, known)
    return list(zip(outcomes["batch_index"].to_pylist(), outcomes["result"].to_pylist(), strict=True))
