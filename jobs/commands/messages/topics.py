"""`delaylake topics`: changes and finds pending messages, with the commands and options of Pulsar's tool and more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from broker.entries.message_ids import MAX_INT64
from jobs.commands.messages import by_filter, redrive
from jobs.commands.messages.changes import (
    ONE_WAY,
    Base64Ids,
    EntryId,
    FromFile,
    LedgerId,
    ScheduleKeys,
    SubscriptionOption,
    Subscriptions,
    Timeout,
    Topic,
    TopicsError,
    Triplets,
    lines_of,
    named,
    run_operation,
    schedule_keys_of,
    split_names,
)
from jobs.commands.messages.operations import command_name, deliver_now_command, operation_command
from jobs.options import Output, OutputOption, global_options, rest_client, show
from jobs.parsers import parse_due_time, parse_duration
from tracker.commands.kinds import CANCEL, OPERATIONS, RESCHEDULE, SKIP

if TYPE_CHECKING:
    from delaylake.commands import Ids

    from broker.entries.message_ids import MessageRef
    from conf.settings import Settings

app = typer.Typer(help="Cancel, skip, find and reschedule messages; pause subscriptions.", no_args_is_help=True)


@app.command("cancel-delayed-message")
def cancel_delayed_message(
    context: typer.Context,
    topic: Topic,
    ledger_id: LedgerId = None,
    entry_id: EntryId = None,
    deliver_at: Annotated[
        int | None,
        typer.Option("-t", "--deliverAt", min=1, max=MAX_INT64, help="Its time of delivery, ms since the epoch."),
    ] = None,
    subscriptions: Subscriptions = None,
    schedule_keys: ScheduleKeys = None,
    from_file: FromFile = None,
    timeout: Timeout = 30,
    output: OutputOption = Output.TEXT,
) -> None:
    """Cancel a delayed message on the given subscriptions, or all.

    For a message that is dispatched already, some seconds before its time, it is TOO_LATE. With --from-file each line
    is `ledger:entry deliverAt`.
    """
    from delaylake.commands import Ids, Named

    from broker.entries.message_ids import MessageRef

    has_ids = (ledger_id, entry_id, deliver_at) != (None, None, None)
    if schedule_keys:
        if from_file is not None or has_ids:
            raise typer.BadParameter(ONE_WAY)
        messages: Named = schedule_keys_of(schedule_keys)
    elif from_file is not None:
        if has_ids:
            raise typer.BadParameter("messages are named by --ledgerId and --entryId or by --from-file, not by both")
        messages = _cancelled(lines_of(from_file))
    elif ledger_id is None or entry_id is None or deliver_at is None:
        raise typer.BadParameter("--ledgerId, --entryId and --deliverAt are needed, or --schedule-key, or --from-file")
    else:
        messages = Ids([MessageRef(ledger_id, entry_id)], [deliver_at])
    run_operation(context, topic, CANCEL, messages, split_names(subscriptions), timeout, output)


def acknowledge_message(
    context: typer.Context,
    topic: Topic,
    ledger_id: LedgerId = None,
    entry_id: EntryId = None,
    subscriptions: Subscriptions = None,
    schedule_keys: ScheduleKeys = None,
    timeout: Timeout = 30,
    output: OutputOption = Output.TEXT,
) -> None:
    """Skip an entry that waits, so that it is not delivered. If it is dispatched already, it is TOO_LATE."""
    from delaylake.commands import Ids, Named

    from broker.entries.message_ids import MessageRef

    if schedule_keys:
        if ledger_id is not None or entry_id is not None:
            raise typer.BadParameter(ONE_WAY)
        message: Named = schedule_keys_of(schedule_keys)
    elif ledger_id is None or entry_id is None:
        raise typer.BadParameter("--ledgerId and --entryId are needed, or --schedule-key")
    else:
        message = Ids([MessageRef(ledger_id, entry_id)])
    run_operation(context, topic, SKIP, message, split_names(subscriptions), timeout, output)


app.command("acknowledgeMessage")(acknowledge_message)
app.command("acknowledge-message", hidden=True)(acknowledge_message)

_BY_FILTER = {
    "cancel": "Cancel the pending messages to which all options given apply, on a subscription or on all.",
    "skip": "Skip the pending messages to which all options given apply; not where types acknowledge cumulatively.",
    "deliver now": "Deliver the pending messages to which all options given apply at once.",
    "restore": "Undo cancels and skips of the messages to which all options given apply, and that are not due yet.",
}
_MEANT = """

They are those that `delaylake pending` lists. Exit status 1 if the change was not done for some, such as those that are
dispatched already."""
for _action, _text in _BY_FILTER.items():
    app.command(f"{_action.replace(' ', '-')}-by-filter")(by_filter.command_by_filter(_action, _text + _MEANT))
app.command("reschedule-by-filter")(by_filter.reschedule_by_filter)
app.command("purge")(by_filter.purge)
app.command("redrive")(redrive.redrive)


@app.command("reschedule")
def reschedule(
    context: typer.Context,
    topic: Topic,
    subscription: SubscriptionOption,
    triplets: Triplets = None,
    base64_ids: Base64Ids = None,
    schedule_keys: ScheduleKeys = None,
    from_file: FromFile = None,
    deliver_at: Annotated[
        int | None,
        typer.Option(parser=parse_due_time, metavar="TIME", help="When: ISO 8601 with a zone, or ms since the epoch."),
    ] = None,
    deliver_after: Annotated[
        int | None, typer.Option(parser=parse_duration, metavar="DELAY", help="How long from now: 10s, 5m, 2h, 1d.")
    ] = None,
    timeout: Timeout = 30,
    output: OutputOption = Output.TEXT,
) -> None:
    """Deliver messages that wait at another time, earlier or later. They keep their ids."""
    if (deliver_at is None) == (deliver_after is None):
        raise typer.BadParameter("one of --deliver-at and --deliver-after is needed")
    due = deliver_at if deliver_at is not None else time.time_ns() // 1_000_000 + (deliver_after or 0)
    messages = named(triplets, base64_ids, from_file, schedule_keys)
    run_operation(context, topic, RESCHEDULE, messages, [subscription], timeout, output, deliver_at=due)


app.command("deliver-now")(deliver_now_command())
for _operation in OPERATIONS.values():
    if _operation.command and not _operation.is_of_schedule:
        app.command(command_name(_operation))(operation_command(_operation))


@app.command("get-message-id-by-index")
def get_message_id_by_index(
    context: typer.Context,
    topic: Topic,
    index: Annotated[int, typer.Option("-i", "--index", help="The message's index in the topic, from 0.")],
    output: OutputOption = Output.TEXT,
) -> None:
    """Show the id of the entry with an index, as `ledger:entry:partition:-1`; -1 throughout if it has expired.

    Name a partition of a partitioned topic. An entry is known some seconds after it came.
    """
    options = global_options(context)
    if options.api_url is None:
        found = _entry_of_index(options.settings, topic, index)
    else:
        with rest_client(options, options.api_url) as client:
            found = client.message_id_by_index(topic, index)
    value = {"ledgerId": found.ledger_id, "entryId": found.entry_id, "partitionIndex": found.partition}
    show(output, value, str(found))


def _cancelled(lines: list[str]) -> Ids:
    """Reads the lines of a file, each `ledger:entry deliverAt`.

    Raises:
        TopicsError, MessageIdError: a line is none.
    """
    from delaylake.commands import Ids

    from broker.entries.message_ids import NumberError, parse, parse_number

    messages, times = [], []
    for line in lines:
        message, _, given = line.partition(" ")
        try:
            deliver_at = parse_number(given.strip())
        except NumberError:
            deliver_at = 0
        if not 0 < deliver_at <= MAX_INT64:
            raise TopicsError(f"no time of delivery: {line[:80]!r} (ledger:entry deliverAt)")
        messages.append(parse(message))
        times.append(deliver_at)
    return Ids(messages, times)


def _entry_of_index(settings: Settings, topic: str, index: int) -> MessageRef:
    from deltalake.exceptions import TableNotFoundError

    from tracker.commands.decode import resolve_topic
    from warehouse.delta.tables import Tables
    from warehouse.queries.message_index import MessageIndex

    source, partition = resolve_topic(topic, {route.source for route in settings.routes})
    if source is None:
        raise TopicsError(f"no route has the topic {topic!r}")
    try:
        return MessageIndex(Tables(settings.warehouse)).find(source, partition, index)
    except TableNotFoundError as error:
        raise TopicsError(f"no table of entries in {settings.warehouse}: the job has not run yet") from error
