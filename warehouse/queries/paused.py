"""Reads from the Delta tables which subscriptions are paused."""

from __future__ import annotations

from deltalake.exceptions import TableNotFoundError

from tracker.commands.kinds import Effect
from warehouse.delta.snapshot import Snapshot
from warehouse.named_queries import TRUE, NamedQueries
from warehouse.pending import EFFECT, IS_PAUSE_CHANGE

_SQL = NamedQueries(__file__, effect=EFFECT, is_pause_change=IS_PAUSE_CHANGE)


def paused_subscriptions(warehouse: str, topic: str | None = None) -> set[tuple[str, str]]:
    """Returns the (topic, subscription) pairs that are paused; `*` stands for subscriptions that are added later.

    Args:
        warehouse: folder or URI of the warehouse; without tables nothing is paused.
        topic: the source topic; None: all.

    Raises:
        UnreadableWarehouseError: the tables can't be read.
    """
    try:
        outcomes = Snapshot(warehouse, {"outcomes": None})
    except TableNotFoundError:
        return set()
    in_topic = TRUE if topic is None else _SQL("in_topic", topic=topic)
    changes = outcomes.sql(_SQL("pause_changes", in_topic=in_topic)).to_pylist()
    last = {(row["topic"], row["subscription"]): row["effect"] for row in changes}
    return {of for of, effect in last.items() if effect == Effect.HOLD}
