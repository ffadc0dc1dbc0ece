"""The parts that commands about messages share: options that name messages, and sending a command."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from broker.entries.message_ids import MAX_INT64
from conf.errors import DelayLakeError
from jobs.options import GlobalOptions, Output, global_options, rest_client, show

if TYPE_CHECKING:
    from delaylake.commands import Keys, Named
    from delaylake.message_ids import Outcome

    from admin.control.client import ControlClient
    from admin.control.rest_client import RestClient
    from broker.entries.message_ids import MessageRef

    Client = ControlClient | RestClient

_SHOWN = 20

ONE_WAY = "messages are named by their ids or by --schedule-key, not by both"

Topic = Annotated[str, typer.Argument(help="The source topic: persistent://tenant/namespace/topic.")]
LedgerId = Annotated[
    int | None, typer.Option("-l", "--ledgerId", min=0, max=MAX_INT64, help="Ledger id of the message.")
]
EntryId = Annotated[int | None, typer.Option("-e", "--entryId", min=0, max=MAX_INT64, help="Entry id of the message.")]
Subscriptions = Annotated[
    str | None,
    typer.Option(
        "-s", "--subscriptionNames", help="Subscriptions, separated by commas; none: all; *: later ones, too."
    ),
]
FromFile = Annotated[
    typer.FileText | None, typer.Option("--from-file", help="Read ids from a file, one a line; - is standard input.")
]
SubscriptionOption = Annotated[str, typer.Option("-s", "--subscription", help="The subscription.")]
Triplets = Annotated[
    list[str] | None, typer.Option("--messageId-triplet", help="ledger:entry[:batchIndex]; may be repeated.")
]
Base64Ids = Annotated[
    list[str] | None, typer.Option("--messageId-base64", help="A message id in base64; may be repeated.")
]
ScheduleKeys = Annotated[
    list[str] | None,
    typer.Option("--schedule-key", help="The message that waits under this schedule key; may be repeated."),
]
Timeout = Annotated[float, typer.Option(min=1, help="How many seconds to wait for the answer.")]


class TopicsError(DelayLakeError):
    """A command was wrong, or not applied to all messages that it names."""


def _client(options: GlobalOptions) -> Client:
    """Returns a client for the admin API if one is named, else for the control topic."""
    if options.api_url is not None:
        return rest_client(options, options.api_url)
    from admin.control.client import ControlClient

    return ControlClient(options.settings, getpass.getuser())


def run_operation(
    context: typer.Context,
    topic: str,
    kind: str,
    named: Named | None,
    subscriptions: Sequence[str],
    timeout: float,
    output: Output,
    **fields: int | str,
) -> None:
    """Asks for an operation and prints its outcomes; of many, as text, only the counts and the first that failed.

    Args:
        context: the command line's context.
        topic, kind, named, subscriptions, fields: as of `ControlClient.send`.
        timeout: seconds.
        output: text or JSON.

    Raises:
        TopicsError: the operation was not done for all messages that it names.
    """
    run_command(
        context,
        1 if named is None else len(named),
        output,
        lambda client: client.send(topic, kind, named, subscriptions, timeout, **fields),
    )


def run_command(context: typer.Context, n: int, output: Output, command: Callable[[Client], Iterator[Outcome]]) -> None:
    """Runs a command and prints its outcomes; of many, as text, only the counts and the first that failed.

    Args:
        context: the command line's context.
        n: the number of messages that the command names.
        output: text or JSON.
        command: calls the client.

    Raises:
        TopicsError: the command was not applied to all messages that it names.
    """
    from rich.console import Console
    from rich.progress import Progress

    from admin.control.requests import outcome_json, outcome_text

    outcomes = []
    with _client(global_options(context)) as client:
        console = Console(stderr=True)
        with Progress(console=console, disable=n <= _SHOWN or not console.is_terminal) as progress:
            task = progress.add_task("messages", total=n)
            for outcome in command(client):
                outcomes.append(outcome)
                progress.update(task, completed=min(n, len(outcomes)))
    failed = [outcome for outcome in outcomes if not outcome.is_done]
    shown = outcomes if len(outcomes) <= _SHOWN else failed[:_SHOWN]
    lines = [outcome_text(outcome) for outcome in shown]
    if len(outcomes) > _SHOWN:
        lines.append(f"{len(outcomes) - len(failed):,} of {len(outcomes):,} done")
    show(output, [outcome_json(outcome) for outcome in outcomes], "\n".join(lines))
    if failed:
        raise TopicsError(
            f"not done: {outcome_text(failed[0])}" + (f", and {len(failed) - 1:,} more" if failed[1:] else "")
        )


def named(
    triplets: list[str] | None,
    base64_ids: list[str] | None,
    from_file: typer.FileText | None,
    keys: list[str] | None = None,
) -> Named:
    """Returns the messages that the options name.

    Raises:
        BadParameter: none is named, they are named in two ways, or an option has no message id or key.
        MessageIdError: a line of the file is none.
    """
    from delaylake.commands import Ids

    from broker.entries.message_ids import MessageIdError, parse, parse_base64, parse_triplet

    if keys:
        if triplets or base64_ids or from_file is not None:
            raise typer.BadParameter(ONE_WAY)
        return schedule_keys_of(keys)
    try:
        messages = [parse_triplet(text) for text in triplets or ()] + [parse_base64(text) for text in base64_ids or ()]
    except MessageIdError as error:
        raise typer.BadParameter(str(error)) from None
    if from_file is not None:
        messages += [parse(line) for line in lines_of(from_file)]
    if not messages:
        raise typer.BadParameter("--messageId-triplet, --messageId-base64 or --from-file is needed")
    return Ids(messages)


def schedule_keys_of(keys: list[str]) -> Keys:
    """Returns the schedule keys, each once.

    Raises:
        BadParameter: one can be no key.
    """
    from delaylake.commands import Keys

    from tracker.due_time import BadScheduleError
    from tracker.properties import check_key

    try:
        for key in keys:
            check_key(key)
    except BadScheduleError as error:
        raise typer.BadParameter(str(error)) from None
    return Keys(list(dict.fromkeys(keys)))


def message_of(text: str) -> MessageRef:
    """Reads a message id in any of its forms.

    Raises:
        BadParameter: it is none.
    """
    from broker.entries.message_ids import MessageIdError, parse

    try:
        return parse(text)
    except MessageIdError as error:
        raise typer.BadParameter(str(error)) from None


def split_names(subscriptions: str | None) -> list[str]:
    """Returns the subscriptions of an option that has them separated by commas; none: it was not given.

    Raises:
        BadParameter: it was given, and names none, as of a variable that is not set: that must not be for all.
    """
    if subscriptions is None:
        return []
    names = [name.strip() for name in subscriptions.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter("--subscriptionNames names none: leave it out for all")
    return names


def lines_of(file: typer.FileText) -> list[str]:
    """Returns the lines of a file that are not empty.

    Raises:
        TopicsError: there are none, or it is no text.
    """
    try:
        lines = [line.strip() for line in file if line.strip()]
    except UnicodeDecodeError:
        raise TopicsError(f"{file.name} is no text in UTF-8") from None
    if not lines:
        raise TopicsError(f"{file.name} has no ids")
    return lines
