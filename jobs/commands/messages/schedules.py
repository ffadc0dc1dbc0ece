"""`delaylake schedules`: shows recurring messages with their next occurrences, and changes them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.errors import DelayLakeError
from conf.times import time_text
from jobs.commands.messages.changes import (
    ScheduleKeys,
    Subscriptions,
    Timeout,
    message_of,
    run_command,
    split_names,
)
from jobs.commands.messages.filter_options import SubscriptionOption, Topic
from jobs.commands.messages.operations import ID_ARGUMENT, OptionalId, command_name, operation_command, schedules_named
from jobs.options import GlobalOptions, Output, OutputOption, global_options, rest_client, show
from jobs.parsers import parse_time, recurrence_properties
from jobs.text_table import table_text
from tracker.commands.kinds import CANCEL, OPERATIONS, SKIP

if TYPE_CHECKING:
    from delaylake.message_ids import Outcome

    from broker.entries.message_ids import MessageRef
    from jobs.commands.messages.changes import Client
    from warehouse.schedules.schedule import Occurrence, Schedule

app = typer.Typer(
    help="Recurring messages: list them, see when they come next, skip an occurrence, pause, resume and end them.",
    no_args_is_help=True,
)

_UPCOMING = 5  # occurrences that `show` shows
_MOST = 1_000

Id = Annotated[str, ID_ARGUMENT]


class ScheduleError(DelayLakeError):
    """There is no such schedule."""


@app.command("list")
def list_schedules(
    context: typer.Context,
    topic: Topic,
    subscription: SubscriptionOption = None,
    with_ended: Annotated[bool, typer.Option("--all", help="Also ended ones.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 100,
    output: OutputOption = Output.TEXT,
) -> None:
    """List the schedules of a topic, in the order in which they came.

    A schedule is listed a few seconds after its message was sent, and its progress is a few seconds old.
    """
    options = global_options(context)
    found = _listed(options, topic, subscription, with_ended, limit)
    lines = _table(found["schedules"], options.zone)
    show(output, found, f"{lines}\n... and more (--limit)" if found["nextCursor"] else lines)


@app.command("show")
def show_schedule(
    context: typer.Context,
    topic: Topic,
    schedule_id: Id,
    subscription: SubscriptionOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show a schedule: its rule, its progress for each subscription, and its next occurrences."""
    options = global_options(context)
    found = _shown(options, topic, schedule_id, subscription, _UPCOMING)
    show(output, found, _text(found, options.zone))


@app.command("next")
def next_occurrences(
    context: typer.Context,
    n: Annotated[int, typer.Argument(metavar="N", min=1, max=_MOST, help="How many.", show_default=False)],
    topic: Annotated[str | None, typer.Argument(help="The source topic of a schedule.", show_default=False)] = None,
    schedule_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="The schedule: its message's id.", show_default=False)
    ] = None,
    subscription: SubscriptionOption = None,
    repeat: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Instead of a schedule, a rule to try: a cron expression, @every 90s, or an RRULE.",
            show_default=False,
        ),
    ] = None,
    time_zone: Annotated[
        str | None,
        typer.Option(metavar="ZONE", help="Zone of the times shown, and of --repeat. Default UTC.", show_default=False),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(
            parser=parse_time, metavar="TIME", help="With --repeat: after this time. Default now.", show_default=False
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show the next N occurrences of a schedule, or of a rule to try."""
    options = global_options(context)
    if repeat is None and (topic is None or schedule_id is None):
        raise typer.BadParameter("TOPIC and ID are needed, or --repeat")
    if repeat is not None and (topic, schedule_id, subscription) != (None, None, None):
        raise typer.BadParameter("--repeat is a rule to try: it goes without TOPIC, ID and --subscription")
    if repeat is None:
        if after is not None:
            raise typer.BadParameter("--after goes with --repeat")
        upcoming = _shown(options, str(topic), str(schedule_id), subscription, n)["upcoming"]
    else:
        upcoming = [one.to_json() for one in _of_rule(repeat, time_zone, after, n)]
    if not upcoming:
        typer.echo("none: nothing comes any more" if repeat is None else "none: the rule has no such time", err=True)
    show(output, upcoming, _occurrences_text(upcoming, options.zone if time_zone is None else _zone(time_zone)))


for _operation in OPERATIONS.values():
    if _operation.is_of_schedule:
        app.command(command_name(_operation))(operation_command(_operation))


@app.command("end")
def end(
    context: typer.Context,
    topic: Topic,
    schedule_id: OptionalId = None,
    subscriptions: Subscriptions = None,
    schedule_keys: ScheduleKeys = None,
    timeout: Timeout = 30,
    output: OutputOption = Output.TEXT,
) -> None:
    """End a schedule: no further occurrence is delivered.

    An occurrence that is dispatched already is delivered. `delaylake topics restore` takes the schedule up again, until
    the cancelled occurrence would be due. With --schedule-key it does as `delaylake topics cancel-delayed-message`.
    """
    named, names = schedules_named(schedule_id, schedule_keys), split_names(subscriptions)
    options = global_options(context)

    def ended(client: Client) -> Iterator[Outcome]:
        from delaylake.commands import Ids, Keys

        from admin.control.rest_client import RestClient

        if isinstance(named, Keys):
            return client.send(topic, CANCEL, named, names, timeout)
        message = message_of(str(schedule_id))
        if isinstance(client, RestClient):
            return client.end_schedule(topic, message, names, timeout)
        found = _found(options, topic, message, None)
        # A cancel is for a whole entry, which may have other messages.
        if found.batch_size > 1:
            return client.send(topic, SKIP, Ids([found.ref]), names, timeout)
        return client.send(topic, CANCEL, Ids([found.ref], [found.cancel_at]), names, timeout)

    run_command(context, len(named), output, ended)


def _listed(options: GlobalOptions, topic: str, subscription: str | None, with_ended: bool, limit: int) -> Any:
    """Returns schedules from the tables or the admin API, as the API's JSON."""
    from warehouse.routes.missing_routes import settings_with
    from warehouse.schedules.schedules import MAX_LIMIT, Schedules

    if options.api_url is None:
        settings, _ = settings_with(options.settings, topic)
        return Schedules(settings, topic, subscription).page(limit, None, with_ended).to_json()
    found: dict[str, Any] = {"schedules": [], "nextCursor": None}
    with rest_client(options, options.api_url) as client:
        while len(found["schedules"]) < limit:
            query: dict[str, Any] = {"limit": min(limit - len(found["schedules"]), MAX_LIMIT), "withEnded": with_ended}
            query |= {"subscription": subscription} if subscription else {}
            query |= {"cursor": found["nextCursor"]} if found["nextCursor"] else {}
            page = client.schedules(topic, query, None)
            found = {**page, "schedules": found["schedules"] + page["schedules"]}
            if not page["nextCursor"]:
                break
    return found


def _shown(options: GlobalOptions, topic: str, schedule_id: str, subscription: str | None, n: int) -> Any:
    """Returns a schedule with its next occurrences, in the API's form."""
    message = message_of(schedule_id)
    if options.api_url is None:
        found = _found(options, topic, message, subscription)
        return {**found.to_json(), "upcoming": [one.to_json() for one in found.upcoming(n)]}
    query = {"next": n, **({"subscription": subscription} if subscription else {})}
    with rest_client(options, options.api_url) as client:
        return client.schedules(topic, query, message)


def _found(options: GlobalOptions, topic: str, message: MessageRef, subscription: str | None) -> Schedule:
    from warehouse.routes.missing_routes import settings_with
    from warehouse.schedules.schedules import Schedules

    settings, _ = settings_with(options.settings, topic)
    found = Schedules(settings, topic, subscription).find(message)
    if found is None:
        raise ScheduleError(f"no recurring message {message} of {topic} is known: a new one is after some seconds")
    return found


def _of_rule(repeat: str, time_zone: str | None, after: int | None, n: int) -> list[Occurrence]:
    """Returns the first n occurrences of a rule, for a message published at `after`, ms since the epoch; None: now."""
    import time
    from itertools import islice

    from tracker.recurrence.recurrence import recurrence_of
    from warehouse.schedules.schedule import Occurrence, occurrences_after

    rule = recurrence_of(recurrence_properties(repeat, time_zone, None, None, None))
    start = rule.first(time.time_ns() // 1_000_000 if after is None else after, None)
    if start is None:
        return []
    return [Occurrence(1, start), *islice(occurrences_after(rule, 1, start, start), n - 1)]


def _zone(name: str) -> tzinfo | None:
    from conf.times import parse_zone

    try:
        return parse_zone(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _table(schedules: list[dict[str, Any]], zone: tzinfo | None) -> str:
    rows = [
        [
            s["id"],
            s["repeat"] if s["timeZone"] == "UTC" else f"{s['repeat']} ({s['timeZone']})",
            _due(s, zone),
            "" if s["nextOccurrence"] is None else str(s["nextOccurrence"]),
            s["key"] or "",
            ",".join(one["subscription"] for one in s["subscriptions"]),
        ]
        for s in schedules
    ]
    return table_text(["schedule", "repeat", "next", "occurrence", "key", "subscriptions"], rows, right=["occurrence"])


_STATES = {"held": "held back", "paused": "paused", "takenBack": "cancelled", "ended": "ended"}


def _due(schedule: dict[str, Any], zone: tzinfo | None) -> str:
    at = schedule["nextDeliverAt"]
    return _STATES.get(schedule["state"], "") if at is None or schedule["state"] != "waiting" else time_text(at, zone)


def _text(schedule: dict[str, Any], zone: tzinfo | None) -> str:
    def at(millis: int | None) -> str:
        return "" if millis is None else time_text(millis, zone)

    fields = {
        "schedule": schedule["id"],
        "repeat": f"{schedule['repeat']} ({schedule['timeZone']})",
        "until": at(schedule["repeatUntil"]),
        "times": "" if schedule["repeatTimes"] is None else str(schedule["repeatTimes"]),
        "misfire": schedule["misfire"],
        "first": at(schedule["firstDeliverAt"]),
        "key": schedule["key"] or "",
        "schedule key": schedule["scheduleKey"] or "",
    }
    lines = [f"{name + ':':<14}{value}" for name, value in fields.items() if value]
    rows = [
        [
            one["subscription"],
            _STATES.get(one["state"], one["state"]),
            f"{one['delivered']:,}",
            at(one["lastDeliverAt"]),
            "" if one["nextOccurrence"] is None else str(one["nextOccurrence"]),
            at(one["nextDeliverAt"]),
        ]
        for one in schedule["subscriptions"]
    ]
    names = ["subscription", "state", "delivered", "last", "occurrence", "next"]
    upcoming = _occurrences_text(schedule["upcoming"], zone)
    return "\n".join([*lines, "", table_text(names, rows, right=["delivered", "occurrence"]), "", upcoming])


def _occurrences_text(upcoming: list[dict[str, Any]], zone: tzinfo | None) -> str:
    rows = [[str(one["occurrence"]), time_text(one["deliverAt"], zone)] for one in upcoming]
    return table_text(["occurrence", "deliver at"], rows, right=["occurrence"])
