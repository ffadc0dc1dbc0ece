"""`delaylake pending`: what waits; and `topics cancel-by-filter` and `skip-by-filter`, which take it back."""

from __future__ import annotations

import getpass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.errors import DelayLakeError
from jobs.options import Output, OutputOption, global_options, show
from jobs.produce import parse_property, parse_time

if TYPE_CHECKING:
    from admin.bulk import Call, Plan, Tally
    from admin.control_client import ControlClient, Outcome
    from admin.pending import Pending, PendingFilter, PendingMessage
    from admin.policy import Operation

_SHOWN = 20  # messages, of those that are about to be taken back

Topic = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The source topic, or one of its partitions.", show_default=False)
]
SubscriptionOption = Annotated[
    str | None, typer.Option("-s", "--subscription", help="The subscription; none: all.", show_default=False)
]
_TIME = "ISO 8601 with a zone, or ms since the epoch."
DueBefore = Annotated[
    int | None,
    typer.Option(parser=parse_time, metavar="TIME", help=f"Due before: {_TIME}", show_default=False),
]
DueAfter = Annotated[
    int | None,
    typer.Option(parser=parse_time, metavar="TIME", help=f"Due at this time or later: {_TIME}", show_default=False),
]
Key = Annotated[str | None, typer.Option(help="The messages' key.", show_default=False)]
Properties = Annotated[
    list[str] | None,
    typer.Option("--property", metavar="KEY=VALUE", help="A property that they have. Repeatable.", show_default=False),
]
Producer = Annotated[str | None, typer.Option("--producer-name", help="Who sent them.", show_default=False)]
Ledger = Annotated[int | None, typer.Option("-l", "--ledgerId", min=0, help="Of this ledger.", show_default=False)]
Entry = Annotated[int | None, typer.Option("-e", "--entryId", min=0, help="Of this entry.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say how many there are, and show the first.")]
Max = Annotated[int, typer.Option("--max", min=1, help="Do nothing where there are more than this many.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Timeout = Annotated[float, typer.Option(min=1, help="How many seconds to wait for answers.")]


class BulkError(DelayLakeError):
    """Not all was taken back."""


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
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many.")] = 100,
    stats: Annotated[bool, typer.Option("--stats", help="Show counts by subscription instead.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """List the messages that wait, soonest first.

    A message is listed a few seconds after it was sent (tracker.max_seal_interval_millis), and one that is due sooner
    than about 10 seconds after that never.
    """
    from admin.pending import Pending

    settings = global_options(context).settings
    wanted = _filter(subscription, due_before, due_after, key, properties, producer_name, ledger_id, entry_id)
    question = Pending(settings, topic, wanted)
    if stats:
        counts = question.stats()
        show(output, counts, _stats_text(counts) if output is Output.TEXT else "")
        return
    page = question.page(limit)
    lines = _messages_text(page.messages) if output is Output.TEXT else ""
    if page.cursor:
        lines += "\n... and more (--limit)"
    show(output, page.to_json(), lines)


def cancel_by_filter(
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
    dry_run: DryRun = False,
    max_matched: Max = 10_000,
    yes: Yes = False,
    timeout: Timeout = 60,
    output: OutputOption = Output.TEXT,
) -> None:
    """Cancel the pending messages to which all options given apply, on a subscription or on all.

    Meant are those that `delaylake pending` lists. Exit status 1 where some were not cancelled, as those that are
    handed out already.
    """
    from admin.policy import Operation

    wanted = _filter(subscription, due_before, due_after, key, properties, producer_name, ledger_id, entry_id)
    _take_back(context, topic, wanted, Operation.CANCEL, dry_run, max_matched, yes, timeout, output)


def skip_by_filter(
    context: typer.Context,
    topic: Topic,
    subscription: Annotated[str, typer.Option("-s", "--subscription", help="The subscription.", show_default=False)],
    due_before: DueBefore = None,
    due_after: DueAfter = None,
    key: Key = None,
    properties: Properties = None,
    producer_name: Producer = None,
    ledger_id: Ledger = None,
    entry_id: Entry = None,
    dry_run: DryRun = False,
    max_matched: Max = 10_000,
    yes: Yes = False,
    timeout: Timeout = 60,
    output: OutputOption = Output.TEXT,
) -> None:
    """Skip the pending messages of a subscription to which all options given apply.

    As cancel-by-filter; not for subscriptions that acknowledge cumulatively.
    """
    from admin.policy import Operation

    wanted = _filter(subscription, due_before, due_after, key, properties, producer_name, ledger_id, entry_id)
    _take_back(context, topic, wanted, Operation.SKIP, dry_run, max_matched, yes, timeout, output)


def _filter(
    subscription: str | None,
    due_before: int | None,
    due_after: int | None,
    key: str | None,
    properties: list[str] | None,
    producer_name: str | None,
    ledger_id: int | None,
    entry_id: int | None,
) -> PendingFilter:
    from pydantic import ValidationError

    from admin.pending import PendingFilter

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
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise typer.BadParameter(" ".join([*map(str, first["loc"]), first["msg"]])) from None


def _take_back(
    context: typer.Context,
    topic: str,
    wanted: PendingFilter,
    operation: Operation,
    dry_run: bool,
    max_matched: int,
    yes: bool,
    timeout: float,
    output: Output,
) -> None:
    """Takes back what a filter means, and tells the counts.

    Raises:
        BulkError: not all was taken back.
    """
    from rich.console import Console

    from admin.bulk import check, matching, plan
    from admin.control_client import ControlClient
    from admin.pending import Pending

    if not wanted.is_selective:
        raise typer.BadParameter("say which messages are meant; --due-after 0 means all")
    settings = global_options(context).settings
    question = Pending(settings, topic, wanted)
    check(question, operation)
    if dry_run:
        _show_matching(question, output)
        return
    messages = matching(question, max_matched)
    steps = plan(question.subscriptions, messages)
    console = Console(stderr=True)
    if messages and not yes:
        if not console.is_terminal:
            raise BulkError(f"{len(messages):,} messages match, and nobody can be asked: give --yes or --dry-run")
        console.print(_messages_text(messages[:_SHOWN]), highlight=False)
        typer.confirm(f"{operation} {len(messages):,} messages?", abort=True, err=True)
    with ControlClient(settings, getpass.getuser()) as client:
        tally = _run(client, question, steps, timeout, console)
    counts = tally.to_json()
    text = [f"{len(messages):,} messages matched"] + [f"{n:,} {name}" for name, n in sorted(tally.results.items())]
    show(output, {"matched": len(messages), **counts}, "\n".join(text))
    if not tally.is_complete:
        late = f", {counts['tooLate']:,} of them too late" if counts["tooLate"] else ""
        raise BulkError(f"{steps.total - tally.done:,} of {steps.total:,} were not taken back{late}")


def _run(client: ControlClient, question: Pending, steps: Plan, timeout: float, console: Any) -> Tally:
    from rich.progress import Progress

    from admin.bulk import Tally
    from admin.control_client import ControlError

    tally = Tally(steps)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("messages", total=steps.total)
        for call in steps.calls:
            try:
                for outcome in _outcomes(client, question.topic, call, timeout):
                    tally.add(outcome)
                    progress.update(task, completed=tally.results.total())
            except ControlError as error:
                raise BulkError(f"{tally.done:,} of {steps.total:,} were taken back, then: {error}") from error
    return tally


def _outcomes(client: ControlClient, topic: str, call: Call, timeout: float) -> list[Outcome] | Any:
    if call.cancels:
        return client.cancel(topic, call.cancels, [call.subscription], timeout)
    return client.skip(topic, call.skips, [call.subscription], timeout)


def _show_matching(question: Pending, output: Output) -> None:
    page = question.page(100)
    n = question.count()
    text = "\n".join([f"{n:,} messages match", *([_messages_text(page.messages[:_SHOWN])] if n else [])])
    show(output, {"matched": n, "messages": page.to_json()["messages"]}, text)


def _messages_text(messages: list[PendingMessage]) -> str:
    rows = [[_time(m.deliver_at), str(m.ref), m.key or "", ",".join(m.subscriptions)] for m in messages]
    return _columns(["deliver at", "message", "key", "subscriptions"], rows)


def _stats_text(stats: dict[str, Any]) -> str:
    columns = {
        "subscription": "subscription",
        "pending": "pending",
        "< 1 min": "dueWithinMinute",
        "< 1 h": "dueWithinHour",
        "< 1 day": "dueWithinDay",
        "taken back": "takenBack",
        "earliest": "earliest",
        "latest": "latest",
    }
    rows = []
    for row in stats["subscriptions"]:
        values = {name: _time(row[name]) if name in ("earliest", "latest") else row[name] for name in columns.values()}
        rows.append([f"{v:,}" if isinstance(v, int) else v for v in values.values()])
    age = stats["lastWriteAgeMillis"] / 1000
    return _columns(list(columns), rows) + f"\nthe table was written {age:,.0f} s ago (version {stats['version']})"


def _time(millis: int | None) -> str:
    if millis is None:
        return ""
    from tracker.moved import HELD_MILLIS

    if millis >= HELD_MILLIS:
        return "held back"
    try:
        return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError):  # beyond the year 9999
        return str(millis)


def _columns(names: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]
    return "\n".join(
        "  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in [names, *rows]
    )
