"""`delaylake topics cancel-by-filter` etc. change all messages that match a filter; `purge` cancels all of a topic."""

from __future__ import annotations

import getpass
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.errors import DelayLakeError
from jobs.commands.messages.filter_options import TIME, Topic, with_filter
from jobs.commands.messages.pending import messages_text, read_come_in
from jobs.options import GlobalOptions, Output, OutputOption, global_options, rest_client, show
from jobs.parsers import parse_due_time, parse_duration
from tracker.commands.kinds import CANCEL, RESCHEDULE

if TYPE_CHECKING:
    from rich.console import Console

    from admin.control.bulk import Change, Plan, Tally
    from admin.control.client import ControlClient
    from admin.control.rest_client import RestClient
    from conf.settings import Settings
    from warehouse.queries.listing import PendingFilter
    from warehouse.queries.pending_messages import Pending

_SHOWN = 20  # messages that are shown before they are changed
_MAX_PURGED = 20_000_000  # messages of one call: their ids take 2 GB
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show how many there are, and the first.")]
Max = Annotated[int, typer.Option("--max", min=1, help="Do nothing if there are more than this many.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Timeout = Annotated[float, typer.Option(min=1, help="How many seconds to wait for answers.")]


class BulkError(DelayLakeError):
    """A change by filter, or a purge, was not done, or not for all messages."""


@dataclass(frozen=True)
class Bulk:
    """A change of the messages that match a filter, with the command's options."""

    topic: str
    wanted: PendingFilter
    change: Change
    dry_run: bool
    max_matched: int
    yes: bool  # whether to go on without asking
    timeout: float  # seconds
    output: Output


# Asks whether to go on; its arguments are the number of matching messages, and a function that lists the first of them.
_Confirm = Callable[[int, Callable[[], list[dict[str, Any]]]], None]


def purge(
    context: typer.Context,
    topic: Topic,
    dry_run: DryRun = False,
    yes: Yes = False,
    timeout: Timeout = 60,
    output: OutputOption = Output.TEXT,
) -> None:
    """Cancel all pending messages of a source topic that has no route any more, for all of its subscriptions.

    The job has to run, on settings without the route. Messages that it has not read stay in Pulsar: delete the topic or
    the job's subscription to it.
    """
    from admin.control.bulk import Change
    from conf.settings import SubscriptionType
    from tracker.commands.decode import full_name
    from warehouse.queries.listing import PendingFilter
    from warehouse.routes.missing_routes import settings_with

    options = global_options(context)
    settings, is_missing = settings_with(options.settings, topic)
    if not is_missing:
        routed = any(route.source == full_name(topic) for route in settings.routes)
        raise BulkError(
            f"{topic} has a route: take it out of the settings and start the job again, then purge what waits"
            if routed
            else f"{topic} is not known: no job on {settings.warehouse} has had a route for it"
        )
    # Single messages of a topic without a route can be cancelled whatever the type, as nobody consumes there.
    routes = [
        route.model_copy(
            update={
                "subscriptions": tuple(
                    s.model_copy(update={"type": SubscriptionType.SHARED}) for s in route.subscriptions
                )
            }
        )
        for route in settings.routes
    ]
    purged = settings.model_copy(update={"routes": tuple(routes)})
    bulk = Bulk(topic, PendingFilter(), Change(CANCEL), dry_run, _MAX_PURGED, yes, timeout, output)
    _apply(purged, options, None, bulk)


def command_by_filter(action: str, text: str) -> Callable[..., None]:
    """Makes a command that applies an action to all messages matching a filter.

    Args:
        action: of an operation without fields, its kind; or "deliver now".
        text: the command's help.
    """

    @with_filter
    def command(
        context: typer.Context,
        topic: Topic,
        wanted: PendingFilter,
        dry_run: DryRun = False,
        max_matched: Max = 10_000,
        yes: Yes = False,
        timeout: Timeout = 60,
        output: OutputOption = Output.TEXT,
    ) -> None:
        from admin.control.bulk import Change

        change = Change(RESCHEDULE, {"deliver_at": 0}) if action == "deliver now" else Change(action)
        change_matching(context, Bulk(topic, wanted, change, dry_run, max_matched, yes, timeout, output))

    command.__doc__ = text
    return command


@with_filter
def reschedule_by_filter(
    context: typer.Context,
    topic: Topic,
    wanted: PendingFilter,
    deliver_at: Annotated[
        int | None, typer.Option(parser=parse_due_time, metavar="TIME", help=f"When: {TIME}", show_default=False)
    ] = None,
    later: Annotated[
        int | None,
        typer.Option(
            parser=parse_duration, metavar="DELAY", help="How much later: 10s, 5m, 2h, 1d.", show_default=False
        ),
    ] = None,
    earlier: Annotated[
        int | None, typer.Option(parser=parse_duration, metavar="DELAY", help="How much earlier.", show_default=False)
    ] = None,
    dry_run: DryRun = False,
    max_matched: Max = 10_000,
    yes: Yes = False,
    timeout: Timeout = 60,
    output: OutputOption = Output.TEXT,
) -> None:
    """Deliver the pending messages to which all options given apply at another time, or each later or earlier."""
    from admin.control.bulk import Change

    given = [value for value in (deliver_at, later, earlier) if value is not None]
    if len(given) != 1:
        raise typer.BadParameter("one of --deliver-at, --later and --earlier is needed")
    shift = None if deliver_at is not None else later if later is not None else -(earlier or 0)
    change = Change(RESCHEDULE, {} if deliver_at is None else {"deliver_at": deliver_at}, shift)
    change_matching(context, Bulk(topic, wanted, change, dry_run, max_matched, yes, timeout, output))


def change_matching(context: typer.Context, bulk: Bulk) -> None:
    """Changes the messages matching a filter, and prints counts of the results.

    Raises:
        BulkError: the change was not done, or not for all messages.
        typer.BadParameter: the filter has no condition on messages.
    """
    if not bulk.wanted.is_selective:
        raise typer.BadParameter("say which messages are meant; --due-after 0 means all")
    options = global_options(context)
    _apply(options.settings, options, options.api_url, bulk)


def _apply(settings: Settings, options: GlobalOptions, api_url: str | None, bulk: Bulk) -> None:
    """Does the work of `change_matching`: by the admin API if one is given, else by the control topic and the tables.

    Raises:
        BulkError: the change was not done, or not for all messages.
    """
    from rich.console import Console

    console = Console(stderr=True)

    def confirm(n: int, listed: Callable[[], list[dict[str, Any]]]) -> None:
        if n and not bulk.yes:
            if not console.is_terminal:
                raise BulkError(f"{_matching_text(n)}, and nobody can be asked: give --yes or --dry-run")
            console.print(messages_text(listed(), options.zone), highlight=False, markup=False, emoji=False)
            typer.confirm(f"{bulk.change.kind} {_messages_text(n)}?", abort=True, err=True)

    if api_url is not None:
        with rest_client(options, api_url) as client:
            found = _by_rest(client, bulk, confirm)
    else:
        found = _by_control_topic(settings, bulk, confirm, console)
    if (note := found.get("note")) and bulk.output is Output.TEXT:
        console.print(f"note: {note}", highlight=False, markup=False, emoji=False, soft_wrap=True)
    if bulk.dry_run:
        text = [_matching_text(found["matched"]), messages_text(found["messages"][:_SHOWN], options.zone)]
        show(bulk.output, found, "\n".join(text if found["matched"] else text[:1]))
        return
    counts = {name: n for name, n in found.items() if name not in ("matched", "note") and n}
    show(
        bulk.output,
        found,
        "\n".join([f"{_messages_text(found['matched'])} matched", *(f"{n:,} {name}" for name, n in counts.items())]),
    )
    if left := sum(n for name, n in counts.items() if name not in ("applied", "alreadyApplied", "waiting")):
        late = f", {counts['tooLate']:,} of them too late" if counts.get("tooLate") else ""
        raise BulkError(f"{left:,} of {sum(counts.values()):,} were not done{late}")


def _messages_text(n: int) -> str:
    return f"{n:,} {'message' if n == 1 else 'messages'}"


def _matching_text(n: int) -> str:
    return f"{_messages_text(n)} {'matches' if n == 1 else 'match'}"


def _by_rest(client: RestClient, bulk: Bulk, confirm: _Confirm) -> dict[str, Any]:
    from pydantic.alias_generators import to_camel

    topic, wanted, change = bulk.topic, bulk.wanted, bulk.change
    stats = client.delayed(topic, {"subscription": wanted.subscription} if wanted.subscription else {}, is_stats=True)
    names = [row["subscription"] for row in stats["subscriptions"]]
    content: dict[str, Any] = {
        "filter": wanted.model_dump(by_alias=True, exclude_defaults=True, exclude={"subscription"}, mode="json"),
        "max": bulk.max_matched,
    }
    content |= {to_camel(name): value for name, value in change.fields.items()}
    if change.shift_millis is not None:
        content["shiftMillis"] = change.shift_millis

    def call(name: str, **more: bool) -> dict[str, Any]:
        answer: dict[str, Any] = client.by_filter(topic, name, change.kind, content | more, bulk.timeout)
        return answer

    matching = [call(name, dryRun=True) for name in names]
    most = max(matching, key=lambda found: found["matched"])
    if bulk.dry_run:
        return most
    confirm(most["matched"], lambda: most["messages"][:_SHOWN])
    counts: Counter[str] = Counter()
    notes: dict[str, str] = {}
    for name in names:
        answer = call(name)
        if "note" in answer:
            notes["note"] = answer.pop("note")
        counts.update(answer)
    return {**counts, "matched": most["matched"], **notes}


def _by_control_topic(settings: Settings, bulk: Bulk, confirm: _Confirm, console: Console) -> dict[str, Any]:
    from admin.control.bulk import check, filter_for, matching, plan
    from admin.control.client import ControlClient
    from warehouse.queries.pending_messages import Pending

    wanted = filter_for(bulk.wanted, bulk.change.kind)
    come_in = read_come_in(settings, bulk.topic, wanted)
    question = Pending(settings, bulk.topic, wanted)
    check(question, bulk.change.kind)
    note = question.note_of_unsealed(come_in)
    noted = {"note": note} if note else {}
    if bulk.dry_run:
        return {"matched": question.count(), "messages": question.page(100).to_json()["messages"], **noted}
    rows = matching(question, bulk.max_matched)
    confirm(rows.num_rows, lambda: question.page(_SHOWN).to_json()["messages"])
    steps = plan(question.subscriptions, rows, bulk.change)
    with ControlClient(settings, getpass.getuser()) as client:
        tally = _run(client, question, steps, bulk.timeout, console)
    return {"matched": rows.num_rows, **tally.to_json(), **noted}


def _run(client: ControlClient, question: Pending, steps: Plan, timeout: float, console: Console) -> Tally:
    from rich.progress import Progress

    from admin.control.bulk import Tally
    from admin.control.requests import ControlError

    tally = Tally(steps)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("messages", total=steps.total)
        try:
            for outcome in client.run(question.topic, steps.calls, timeout):
                tally.add(outcome)
                progress.update(task, completed=tally.results.total())
        except ControlError as error:
            raise BulkError(f"{tally.done:,} of {steps.total:,} were done, then: {error}") from error
    return tally
