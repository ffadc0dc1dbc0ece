"""`delaylake pending` lists the messages that wait."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.commands.produce import parse_property, parse_time
from jobs.options import GlobalOptions, Output, OutputOption, global_options, rest_client, show

if TYPE_CHECKING:
    from warehouse.queries.listing import PendingFilter

Topic = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The source topic, or one of its partitions.", show_default=False)
]
SubscriptionOption = Annotated[
    str | None, typer.Option("-s", "--subscription", help="The subscription; none: all.", show_default=False)
]
TIME = "ISO 8601 with a zone, or ms since the epoch."
DueBefore = Annotated[
    int | None,
    typer.Option(parser=parse_time, metavar="TIME", help=f"Due before: {TIME}", show_default=False),
]
DueAfter = Annotated[
    int | None,
    typer.Option(parser=parse_time, metavar="TIME", help=f"Due at this time or later: {TIME}", show_default=False),
]
Key = Annotated[str | None, typer.Option(help="The messages' key.", show_default=False)]
Properties = Annotated[
    list[str] | None,
    typer.Option("--property", metavar="KEY=VALUE", help="A property that they have. Repeatable.", show_default=False),
]
Producer = Annotated[str | None, typer.Option("--producer-name", help="Who sent them.", show_default=False)]
Ledger = Annotated[int | None, typer.Option("-l", "--ledgerId", min=0, help="Of this ledger.", show_default=False)]
Entry = Annotated[int | None, typer.Option("-e", "--entryId", min=0, help="Of this entry.", show_default=False)]


class Listed(StrEnum):
    """Which messages to list, as `warehouse.queries.listing.State`."""

    WAITING = "waiting"
    HELD = "held"
    CANCELLED = "takenBack"


def pending(
    context: typer.Context,
    topic: Topic,
    subscription: SubscriptionOption = None,
    due_before: DueBefore = None,
    due_after: DueAfter = None,
    key: Key = None,
    properties: Properties = None,
    producer_name: Producer = None,
    ledger_id: Ledger = None,
    entry_id: Entry = None,
    state: Annotated[
        Listed, typer.Option(help="held: by a pause; takenBack: cancelled or skipped, and not past: restore undoes it.")
    ] = Listed.WAITING,
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many.")] = 100,
    stats: Annotated[bool, typer.Option("--stats", help="Show counts by subscription instead.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """List the messages that wait, soonest first.

    A message is listed a few seconds after it was sent (tracker.max_seal_interval_millis), and one that is due sooner
    than about 10 seconds after that never.
    """
    wanted = filter_of(subscription, due_before, due_after, key, properties, producer_name, ledger_id, entry_id, state)
    found = _listed(global_options(context), topic, wanted, limit, stats)
    if stats:
        show(output, found, _stats_text(found) if output is Output.TEXT else "")
        return
    lines = messages_text(found["messages"]) if output is Output.TEXT else ""
    if found.get("isWithoutRoute"):
        lines = f"{topic} is without a route: what comes due is held back until the settings have it again\n{lines}"
    if found["nextCursor"]:
        lines += "\n... and more (--limit)"
    show(output, found, lines)


def _listed(options: GlobalOptions, topic: str, wanted: PendingFilter, limit: int, stats: bool) -> Any:
    """Returns messages, or counts where `stats`, from the tables or the admin API, in the API's form."""
    from warehouse.missing_routes import settings_with
    from warehouse.queries.waiting import MAX_LIMIT, Pending

    if options.api_url is None:
        settings, is_missing = settings_with(options.settings, topic)
        question = Pending(settings, topic, wanted)
        found: dict[str, Any] = question.stats() if stats else question.page(limit).to_json()
        return {**found, "isWithoutRoute": True} if is_missing else found
    query = wanted.model_dump(by_alias=True, exclude_defaults=True, exclude={"properties"}, mode="json")
    query["property"] = [f"{name}={value}" for name, value in wanted.properties.items()]
    with rest_client(options, options.api_url) as client:
        if stats:
            return client.delayed(topic, query, is_stats=True)
        found = {"messages": [], "nextCursor": None}
        while len(found["messages"]) < limit:
            left = min(limit - len(found["messages"]), MAX_LIMIT)
            cursor = {"cursor": found["nextCursor"]} if found["nextCursor"] else {}
            page = client.delayed(topic, {**query, "limit": left, **cursor}, is_stats=False)
            found = {**page, "messages": found["messages"] + page["messages"]}
            if not page["nextCursor"]:
                break
        return found


def filter_of(
    subscription: str | None,
    due_before: int | None,
    due_after: int | None,
    key: str | None,
    properties: list[str] | None,
    producer_name: str | None,
    ledger_id: int | None,
    entry_id: int | None,
    state: Listed = Listed.WAITING,
) -> PendingFilter:
    """Returns the filter that options describe.

    Raises:
        typer.BadParameter: they contradict each other, or a value is not allowed.
    """
    from pydantic import ValidationError

    from warehouse.queries.listing import PendingFilter, State

    try:
        return PendingFilter(
            subscription=subscription,
            due_before=due_before,
            due_from=due_after,
            key=key,
            properties=dict(parse_property(text) for text in properties or ()),
            producer_name=producer_name,
            ledger_id=ledger_id,
            entry_id=entry_id,
            state=State(state),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise typer.BadParameter(" ".join([*map(str, first["loc"]), first["msg"]])) from None


def messages_text(messages: list[dict[str, Any]]) -> str:
    """Returns messages, as the JSON of a listing has them, as lines of text."""
    rows = [
        [
            "held back" if m["isHeld"] else _time(m["deliverAt"]),
            m["messageId"],
            m["key"] or "",
            ",".join(m["subscriptions"]),
        ]
        for m in messages
    ]
    return _columns(["deliver at", "message", "key", "subscriptions"], rows)


def _stats_text(stats: dict[str, Any]) -> str:
    columns = {
        "subscription": "subscription",
        "pending": "pending",
        "< 1 min": "dueWithinMinute",
        "< 1 h": "dueWithinHour",
        "< 1 day": "dueWithinDay",
        "held back": "held",
        "taken back": "takenBack",
        "earliest": "earliest",
        "latest": "latest",
    }
    rows = []
    for row in stats["subscriptions"]:
        values = {name: _time(row[name]) if name in ("earliest", "latest") else row[name] for name in columns.values()}
        if row["isPaused"]:
            values["subscription"] += " (paused)"
        rows.append([f"{v:,}" if isinstance(v, int) else v for v in values.values()])
    age = stats["lastWriteAgeMillis"] / 1000
    return _columns(list(columns), rows) + f"\nthe table was written {age:,.0f} s ago (version {stats['version']})"


def _time(millis: int | None) -> str:
    if millis is None:
        return ""
    try:
        return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError):  # beyond the year 9999
        return str(millis)


def _columns(names: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]
    return "\n".join(
        "  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in [names, *rows]
    )
