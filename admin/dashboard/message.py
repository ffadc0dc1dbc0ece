"""One message: what it has, what it waits for, and what became of it, read from the Delta tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from broker.entries.message_ids import MessageRef
from conf.settings import Route, Settings
from status.dead_letters import is_dead_letter
from status.job_status import known_status
from tracker.commands.kinds import OPERATIONS, Effect
from tracker.commands.retries import REDRIVE, SENT_BACK
from tracker.message_state.changes import HELD_DELIVER_AT
from warehouse.delta.snapshot import Snapshot
from warehouse.named_queries import NamedQueries, Sql
from warehouse.pending import EFFECT
from warehouse.queries.listing import PendingFilter, State, time_as_it_came
from warehouse.queries.pending_messages import Pending
from warehouse.routes.known_routes import known_destinations

_SQL = NamedQueries(__file__, effect=EFFECT)

_SHOWN_BYTES = 4_096
_MOST_STANDINGS = 50  # of an entry with several messages

_WORDS = {
    **{operation.kind.upper(): operation.done for operation in OPERATIONS.values()},
    SENT_BACK: "sent back for a retry",
    REDRIVE: "re-driven",
}


@dataclass(frozen=True)
class Standing:
    """How a message stands for some subscriptions. Times are ms since the epoch.

    Attributes:
        names: the subscriptions.
        due: when the message is due, or would be if it was not cancelled; None: it does not wait for them.
        is_cancelled: whether it was cancelled or skipped, and may be restored.
        cancel_at: a time for a cancel that names it.
    """

    ref: MessageRef
    names: list[str]
    due: int | None
    is_cancelled: bool
    cancel_at: int


def standings(settings: Settings, route: Route, ref: MessageRef, found: dict[str, Any]) -> list[Standing]:
    """Returns how a message stands, each subscription once; of an entry with several messages those that wait.

    Args:
        ref: the message, or a whole entry.
        found: as `message_of` returned it.

    Raises:
        PendingError: the tables can't be asked.
    """
    is_entry = ref.batch_index < 0 and found["batch_size"] > 1
    left = [subscription.name for subscription in route.subscriptions]
    standing: list[Standing] = []
    for state in (State.WAITING, State.CANCELLED):
        asked = PendingFilter(ledger_id=ref.ledger_id, entry_id=ref.entry_id, state=state)
        for message in Pending(settings, route.source, asked).page(_MOST_STANDINGS).messages:
            names = [name for name in message.subscriptions if is_entry or name in left]
            if names and ref.batch_index in (-1, message.ref.batch_index):
                is_cancelled = state is State.CANCELLED
                standing.append(Standing(message.ref, names, message.deliver_at, is_cancelled, message.cancel_at))
                left = [name for name in left if name not in names]
    if is_entry:
        return standing[:_MOST_STANDINGS]
    return [*standing, Standing(ref, left, None, False, found["came_due"])] if left else standing


def message_of(settings: Settings, topic: str, ref: MessageRef) -> dict[str, Any] | None:
    """Returns a message as it came, from its first row in the delayed index; None: it has no row.

    Returns:
        the row's columns, of which `deliver_at` is not the time for every subscription: see `standings`; `came_due`,
        when it was due at first; `payload_text`, at most _SHOWN_BYTES of the payload (`is_cut`: it has more) in the
        form `payload_form`, text or hexadecimal; and `payload_bytes`, the payload's size.
    """
    rows = Snapshot(settings.warehouse, {"delayed_index": None}).sql(
        _SQL("first_index_row", condition=_is_of(topic, ref))
    )
    if not rows.num_rows:
        return None
    row: dict[str, Any] = rows.to_pylist()[0]
    payload = row["payload"] or b""
    try:
        text, form = payload[:_SHOWN_BYTES].decode(), "text"
    except UnicodeDecodeError:
        text, form = payload[:_SHOWN_BYTES].hex(" "), "hexadecimal"
    properties = dict(row["properties"] or ())
    return {
        **row,
        "properties": properties,
        "came_due": time_as_it_came(properties, row["publish_time"]),
        "payload_text": text,
        "payload_form": form,
        "payload_bytes": len(payload),
        "is_cut": len(payload) > _SHOWN_BYTES,
    }


def history_of(settings: Settings, topic: str, ref: MessageRef) -> list[dict[str, Any]]:
    """Returns the events of a message from its publishing to its delivery, by time.

    Returns:
        events with `at` (ms since the epoch), `what`, `who`, `subscription` and `detail`, which may be empty, and `to`,
        the new time of a message that was rescheduled, else None.
    """
    snapshot = Snapshot(settings.warehouse, dict.fromkeys(("entries", "outcomes", "deliveries", "delayed_index")))
    is_entry = _is_of(topic, replace(ref, batch_index=-1))
    is_message = _is_of(topic, ref)
    events: list[dict[str, Any]] = []

    def add(at: int, what: str, who: str = "", subscription: str = "", detail: str = "", to: int | None = None) -> None:
        event = {"at": at, "what": what, "who": who, "subscription": subscription, "detail": detail, "to": to}
        events.append(event)

    for row in snapshot.sql(_SQL("published", condition=is_entry)).to_pylist():
        add(row["publish_time"], "published", detail="" if row["batch_size"] == 1 else f"{row['batch_size']} messages")
    rows = snapshot.sql(_SQL("index_rows", condition=is_message)).to_pylist()
    outcomes = snapshot.sql(_SQL("outcomes", condition=is_message)).to_pylist()
    for row in rows:
        if not row["sequence"]:
            add(
                row["publish_time"],
                "kept until it is due",
                row["producer_name"] or "",
                detail="" if row["bucket_id"] is None else f"bucket {row['bucket_id']}",
            )
        elif row["deliver_at"] == HELD_DELIVER_AT:
            add(_held_at(row, rows, outcomes), "held back", subscription=row["subscription"] or "")
    for row in outcomes:
        is_done = row["result"] == "APPLIED"
        what = _WORDS.get(row["operation"], row["operation"]) if is_done else f"{row['operation']}: {row['result']}"
        what = row["result"].lower() if row["result"] in ("SUPERSEDED", "EXPIRED") else what
        to = row["deliver_at"] if row["had_effect"] == Effect.MOVE else None
        add(row["applied_at"], what, row["issued_by"] or "", row["subscription"] or "", row["reason"] or "", to)
    destinations = known_destinations(settings, known_status(settings.warehouse))
    for row in snapshot.sql(_SQL("deliveries", condition=is_message)).to_pylist():
        destination = destinations.get((topic, row["subscription"]))
        is_dead = row["attempt"] and is_dead_letter(row["destination"] or "", destination)
        numbers = [f"{name} {row[name]}, " for name in ("occurrence", "attempt") if row[name]]
        detail = f"{''.join(numbers)}{row['sent_at'] - row['deliver_at']:,} ms after its time"
        add(
            row["sent_at"], "a dead letter" if is_dead else "delivered", row["destination"], row["subscription"], detail
        )
    return sorted(events, key=lambda event: event["at"])


def _held_at(held: dict[str, Any], rows: list[dict[str, Any]], outcomes: list[dict[str, Any]]) -> int:
    """Returns when a message came due and was held back, ms since the epoch.

    Args:
        held: the message's row in the delayed index at HELD_DELIVER_AT.
        rows: all DELAY rows of the message.
        outcomes: the outcomes of the message.
    """
    subscription = held["subscription"]
    # (sequence, time), with the message's own time first, whether it was sealed or not.
    times: list[tuple[int, int]] = [(-1, time_as_it_came(dict(held["properties"] or ()), held["publish_time"]))]
    times += [(r["sequence"] or 0, r["deliver_at"]) for r in rows if r["subscription"] in (None, subscription)]
    times += [
        (o["sequence"], max(o["deliver_at"], o["applied_at"]))
        for o in outcomes
        if (o["had_effect"], o["subscription"]) == (Effect.MOVE, subscription)
    ]
    _, due = max(time for time in times if time[0] < held["sequence"])
    return max(int(held["publish_time"]), due)


def _is_of(topic: str, ref: MessageRef) -> Sql:
    """Returns the SQL condition that a row is of a message, or of its whole entry."""
    query = "is_entry" if ref.batch_index < 0 else "is_message"
    return _SQL(query, topic=topic, ledger=ref.ledger_id, entry=ref.entry_id, batch_index=ref.batch_index)
