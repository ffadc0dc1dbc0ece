"""`delaylake pending` lists the messages that wait."""

from __future__ import annotations

import json
import sys
from datetime import UTC, tzinfo
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.times import time_text
from jobs.commands.messages.filter_options import Topic, with_filter
from jobs.options import GlobalOptions, Output, OutputOption, global_options, rest_client
from jobs.text_table import table_text
from jobs.watch import WatchOption, watch

if TYPE_CHECKING:
    from conf.settings import Settings
    from warehouse.queries.listing import PendingFilter
    from warehouse.queries.unsealed_messages import Unacknowledged


class Listed(StrEnum):
    """Which messages to list, as `warehouse.queries.listing.State` reads it."""

    WAITING = "waiting"
    HELD = "held"
    TAKEN_BACK = "takenBack"
    CANCELLED = "cancelled"


@with_filter
def pending(
    context: typer.Context,
    topic: Topic,
    wanted: PendingFilter,
    state: Annotated[
        Listed,
        typer.Option(
            help="held: by a pause; takenBack, or cancelled: cancelled or skipped, and not past: restore undoes it."
        ),
    ] = Listed.WAITING,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 100,
    stats: Annotated[bool, typer.Option("--stats", help="Show counts by subscription instead.")] = False,
    count: Annotated[
        bool,
        typer.Option("--count", help="Show their number instead; a message of several subscriptions counts once."),
    ] = False,
    every: WatchOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List the messages that wait, soonest first.

    What came in within the last seconds is read from the source topic itself. Going out: it is due within moments, or
    has just been delivered. Counts leave both out: they have a message a few seconds after it was sent.
    """
    from warehouse.queries.listing import State

    if stats and count:
        raise typer.BadParameter("give --stats or --count, not both")
    wanted = wanted.model_copy(update={"state": State(state)})
    options = global_options(context)

    def render() -> str:
        found = _listed(options, topic, wanted, limit, stats or count)
        if count:
            n = found["messages"]
            return json.dumps({"count": n}) if output is Output.JSON else str(n)
        if output is Output.JSON:
            return json.dumps(found)
        if note := found.get("note"):
            print(f"note: {note}", file=sys.stderr)
        return _stats_text(found, options.zone) if stats else _listing_text(topic, found, options.zone)

    if every is None:
        print(render(), flush=True)
    else:
        watch(render, every, output, options.zone)


def _listed(options: GlobalOptions, topic: str, wanted: PendingFilter, limit: int, stats: bool) -> Any:
    """Returns messages, or with `stats` counts, from the tables or the admin API, as the API's JSON."""
    from warehouse.queries.pending_messages import MAX_LIMIT, Pending
    from warehouse.routes.missing_routes import settings_with

    if options.api_url is None:
        settings, is_missing = settings_with(options.settings, topic)
        if stats:
            found: dict[str, Any] = Pending(settings, topic, wanted).stats()
        else:
            come_in = read_come_in(settings, topic, wanted)
            found = Pending(settings, topic, wanted).page(limit, come_in).to_json()
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
            found = {**found, **page, "messages": found["messages"] + page["messages"]}
            if not page["nextCursor"]:
                break
        return found


def read_come_in(settings: Settings, topic: str, wanted: PendingFilter) -> Unacknowledged:
    """Reads what has only just been sent, as `UnacknowledgedReader.read`."""
    from warehouse.queries.listing import resolve_route
    from warehouse.queries.unsealed_messages import UnacknowledgedReader

    source, partition, _ = resolve_route(settings, topic, wanted.subscription)
    return UnacknowledgedReader(settings).read(source, partition, wanted.state)


def _listing_text(topic: str, found: dict[str, Any], zone: tzinfo | None) -> str:
    lines = messages_text(found["messages"], zone)
    if found.get("isWithoutRoute"):
        lines = f"{topic} is without a route: what comes due is held back until the settings have it again\n{lines}"
    return f"{lines}\n... and more (--limit)" if found["nextCursor"] else lines


def messages_text(messages: list[dict[str, Any]], zone: tzinfo | None = UTC) -> str:
    """Formats messages of a listing's JSON as a table, with times in a zone (None: local)."""
    rows = [
        [
            _time_text(m, zone),
            m["messageId"],
            m["key"] or "",
            ",".join(m["subscriptions"]),
            time_text(m["expiresAt"], zone) if "expiresAt" in m else "",
        ]
        for m in messages
    ]
    titles = ["deliver at", "message", "key", "subscriptions", "expires at"]
    n = len(titles) if any("expiresAt" in m for m in messages) else len(titles) - 1
    return table_text(titles[:n], [row[:n] for row in rows])


def _time_text(message: dict[str, Any], zone: tzinfo | None) -> str:
    if message["isHeld"]:
        return "held back"
    if message["deliverAt"] is None:
        return "paused"
    return time_text(message["deliverAt"], zone) + (" (going out)" if message.get("isGoingOut") else "")


def _stats_text(stats: dict[str, Any], zone: tzinfo | None) -> str:
    columns = {
        "subscription": "subscription",
        "pending": "pending",
        "< 1 min": "dueWithinMinute",
        "< 1 h": "dueWithinHour",
        "< 1 day": "dueWithinDay",
        "held back": "held",
        "cancelled": "takenBack",
        "earliest": "earliest",
        "latest": "latest",
    }
    numbers = [name for name in columns if name not in ("subscription", "earliest", "latest")]
    rows = []
    for row in stats["subscriptions"]:
        cells = {name: f"{row[columns[name]]:,}" for name in numbers}
        cells |= {name: "" if row[name] is None else time_text(row[name], zone) for name in ("earliest", "latest")}
        cells["subscription"] = row["subscription"] + (" (paused)" if row["isPaused"] else "")
        rows.append([cells[name] for name in columns])
    age = stats["lastWriteAgeMillis"] / 1000
    table = table_text(list(columns), rows, right=numbers)
    return f"{table}\nthe table was written {age:,.0f} s ago (version {stats['version']})"
