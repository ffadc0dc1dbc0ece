"""The commands of the command line that are made of the operations' descriptions, as `delaylake topics restore`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.commands.messages.by_filter import Bulk, DryRun, Max, Yes, change_matching
from jobs.commands.messages.changes import (
    ONE_WAY,
    Base64Ids,
    FromFile,
    ScheduleKeys,
    SubscriptionOption,
    Subscriptions,
    Timeout,
    Topic,
    Triplets,
    message_of,
    named,
    run_operation,
    schedule_keys_of,
    split_names,
)
from jobs.commands.messages.filter_options import with_filter, with_options
from jobs.options import Output, OutputOption
from jobs.parsers import parse_duration, parse_shift
from tracker.commands.kinds import OPERATIONS, RESCHEDULE, RESTORE, SKIP, Field, Operation

if TYPE_CHECKING:
    from delaylake.commands import Named

    from warehouse.queries.listing import PendingFilter

_PARSERS = {"delay": parse_duration, "shift": parse_shift}

ID_ARGUMENT = typer.Argument(
    metavar="ID",
    help="The message's id, as `delaylake produce` printed it: ledger:entry[:partition:batchIndex].",
    show_default=False,
)
OptionalId = Annotated[str | None, ID_ARGUMENT]

_Fields = dict[str, Any]

_FILTERED_APART = (SKIP, RESTORE)  # operations with a command of their own for filters
_PULSARS_NAMES = {SKIP: "skip-messages"}


def operation_command(operation: Operation) -> Callable[..., None]:
    """Returns the command of an operation, with the options for what it may name and for its fields."""
    if operation.is_of_subscription:
        command = _subscription_command(operation)
    elif operation.is_of_schedule:
        command = _schedule_command(operation)
    elif operation.by_filter and operation.kind not in _FILTERED_APART:
        command = _filter_command(operation)
    else:
        command = _messages_command(operation)
    options = [_option(field) for field in operation.fields]
    made = with_options(command, "fields", options, partial(_values, operation)) if options else command
    made.__doc__ = operation.command
    return made


def deliver_now_command() -> Callable[..., None]:
    """Returns the command that reschedules to a time that is past."""
    made = with_options(_messages_command(OPERATIONS[RESCHEDULE]), "fields", [], lambda: {"deliver_at": 0})
    made.__doc__ = "Deliver messages that wait, or that a pause parks, at once."
    return made


def command_name(operation: Operation) -> str:
    """Returns the name of an operation's command."""
    words = re.sub("[A-Z]", lambda letter: f"-{letter[0].lower()}", operation.path)
    return _PULSARS_NAMES.get(operation.kind, words)


def schedules_named(schedule_id: str | None, schedule_keys: list[str] | None) -> Named:
    """Returns the schedules that the arguments name.

    Raises:
        BadParameter: none, or in two ways.
    """
    from delaylake.commands import Ids

    if schedule_keys:
        if schedule_id is not None:
            raise typer.BadParameter(ONE_WAY)
        return schedule_keys_of(schedule_keys)
    if schedule_id is None:
        raise typer.BadParameter("ID is needed, or --schedule-key")
    return Ids([message_of(schedule_id)])


def _subscription_command(operation: Operation) -> Callable[..., None]:
    def command(
        context: typer.Context,
        topic: Topic,
        subscription: SubscriptionOption,
        timeout: Timeout = 30,
        output: OutputOption = Output.TEXT,
    ) -> None:
        run_operation(context, topic, operation.kind, None, [subscription], timeout, output)

    return command


def _schedule_command(operation: Operation) -> Callable[..., None]:
    def command(
        context: typer.Context,
        topic: Topic,
        schedule_id: OptionalId = None,
        subscriptions: Subscriptions = None,
        schedule_keys: ScheduleKeys = None,
        timeout: Timeout = 30,
        output: OutputOption = Output.TEXT,
    ) -> None:
        messages = schedules_named(schedule_id, schedule_keys)
        run_operation(context, topic, operation.kind, messages, split_names(subscriptions), timeout, output)

    return command


def _messages_command(operation: Operation) -> Callable[..., None]:
    def command(
        context: typer.Context,
        topic: Topic,
        subscription: SubscriptionOption,
        triplets: Triplets = None,
        base64_ids: Base64Ids = None,
        schedule_keys: ScheduleKeys = None,
        from_file: FromFile = None,
        fields: _Fields | None = None,
        timeout: Timeout = 30,
        output: OutputOption = Output.TEXT,
    ) -> None:
        messages = named(triplets, base64_ids, from_file, schedule_keys)
        run_operation(context, topic, operation.kind, messages, [subscription], timeout, output, **(fields or {}))

    made: Callable[..., None] = command
    if not operation.fields:
        made = with_options(made, "fields", [], dict)
    return made if operation.by_key else with_options(made, "schedule_keys", [], lambda: None)


def _filter_command(operation: Operation) -> Callable[..., None]:
    @with_filter
    def command(
        context: typer.Context,
        topic: Topic,
        wanted: PendingFilter,
        fields: _Fields,
        triplets: Triplets = None,
        base64_ids: Base64Ids = None,
        schedule_keys: ScheduleKeys = None,
        from_file: FromFile = None,
        dry_run: DryRun = False,
        max_matched: Max = 10_000,
        yes: Yes = False,
        timeout: Timeout = 60,
        output: OutputOption = Output.TEXT,
    ) -> None:
        from admin.control.bulk import Change

        if triplets or base64_ids or schedule_keys or from_file is not None:
            if wanted.is_selective or dry_run:
                raise typer.BadParameter("messages are named, or matched by a filter, which --dry-run is for: not both")
            if wanted.subscription is None:
                raise typer.BadParameter("--subscription is needed where messages are named")
            messages = named(triplets, base64_ids, from_file, schedule_keys)
            run_operation(context, topic, operation.kind, messages, [wanted.subscription], timeout, output, **fields)
            return
        change = Change(operation.kind, fields)
        change_matching(context, Bulk(topic, wanted, change, dry_run, max_matched, yes, timeout, output))

    made: Callable[..., None] = command
    return made if operation.fields else with_options(made, "fields", [], dict)


def _option(field: Field) -> inspect.Parameter:
    """Returns the option of an operation's field."""
    if field.is_text:
        kind: Any = str
        option = typer.Option(field.option, help=field.text)
    elif field.unit:
        kind = int | None if field.is_optional else int
        option = typer.Option(field.option, parser=_PARSERS[field.unit], metavar="DELAY", help=field.text)
    else:
        kind = int | None if field.is_optional else int
        option = typer.Option(field.option, min=field.least, max=field.most, help=field.text)
    default = inspect.Parameter.empty if not field.is_optional else "" if field.is_text else None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _values(operation: Operation, **given: Any) -> _Fields:
    """Returns the values of an operation's fields; of a missing one 0 or ""."""
    return {field.name: given[field.name] or ("" if field.is_text else 0) for field in operation.fields}
