"""A control of commands on a store of its own, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from tests.support.tracker.messages import TOPIC, Answers, batches, commands, messages
from tracker.commands.control import Control
from tracker.context import Moment
from tracker.message_state.cancelled import Compression
from tracker.schemas import KNOWN, OUTCOME_ROWS, PauseChange
from tracker.store import MemoryStore

SUBSCRIPTIONS = {TOPIC: ["a", "b"]}
TICK_MILLIS = 1_000

NOTHING = KNOWN.empty_table()

# One message alone in its entry, due at 50,000, and a batch of three.
ALONE = messages([(1, 7, 50_000)])
BATCH = batches([(1, 8, i, 3, 50_000 + i) for i in range(3)])


class Desk:
    """A control on a store, and the moment, which passes on by `at`."""

    def __init__(self, compression: Compression | None = None) -> None:
        self.store = MemoryStore()
        self.compression = compression
        self.control = Control(self.store, SUBSCRIPTIONS, TICK_MILLIS, compression)
        self.moment = Moment(tick=1, now=1_000, released=1_000, ingested_through=1)
        self.answers = Answers()

    def at(self, tick: int, released: int, ingested_through: int | None = None) -> Desk:
        """`ingested_through`: up to which tick's commands what was published before them is in; else this tick's."""
        self.moment = Moment(tick, released, released, tick if ingested_through is None else ingested_through)
        return self

    def restart(self) -> None:
        self.control.save()
        self.control = Control(self.store, SUBSCRIPTIONS, TICK_MILLIS, self.compression)

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
        new = np.full(known.num_rows, is_new)
        published = self.control.apply(
            commands(rows),
            ids,
            known.select(KNOWN.names),
            new,
            self.moment,
            pause_changes=pause_changes,
            first_answers=self.answers,
            waiting_outcomes=waiting_outcomes,
        )
        self.answers.keep(published, self.moment.tick)
        return published

    def arrive(self, rows: pa.Table) -> list[tuple[str, int]]:
        published = self.control.apply_waiting(rows, self.moment)
        self.answers.keep(published, self.moment.tick)
        return results(published)

    def expire(self) -> list[tuple[str, int]]:
        published = self.control.expire(self.moment)
        self.answers.keep(published, self.moment.tick)
        return results(published)

    def subscription_mask(self, rows: pa.Table) -> list[int]:
        masks: list[int] = self.control.subscription_mask(rows).tolist()
        return masks


def results(outcomes: pa.Table) -> list[tuple[str, int]]:
    return list(zip(outcomes["subscription"].to_pylist(), outcomes["result"].to_pylist(), strict=True))


def apply_to_batch(desk: Desk, rows: Iterable[dict[str, object]], known: pa.Table = BATCH) -> list[tuple[int, int]]:
    """(batch index, result) of each outcome."""
    rows = list(rows)
    ids = {str(row["request_id"]): 1 for row in rows}
    is_new = np.zeros(known.num_rows, np.bool_)
    outcomes = desk.control.apply(commands(rows), ids, known.select(KNOWN.names), is_new, desk.moment)
    return list(zip(outcomes["batch_index"].to_pylist(), outcomes["result"].to_pylist(), strict=True))
