"""`delaylake produce`: sends messages, delayed or not, and prints their ids."""

from __future__ import annotations

import os
import sys
import threading
import time
from itertools import cycle, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.options import Output, OutputOption, global_options, show
from jobs.parsers import Misfire, parse_due_time, parse_duration, parse_properties, recurrence_properties

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker.client import PulsarError
    from conf.settings import PulsarSettings

DELIVER_AT = "deliverAt"
DELIVER_AFTER = "deliverAfter"
EXPIRE_AT = "expireAt"
EXPIRE_AFTER = "expireAfter"
_TIMES = {DELIVER_AT, DELIVER_AFTER}

# How long, in seconds, to try to reach the broker.
CONNECT_TIMEOUT_SECONDS = 10

# From this number of messages on, progress is shown.
SHOW_PROGRESS_FROM = 1_000


def produce(
    context: typer.Context,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="persistent://tenant/namespace/topic", show_default=False)
    ],
    message: Annotated[
        list[str] | None, typer.Option("--message", "-m", help="A message's text. Repeatable.", show_default=False)
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--count",
            min=1,
            help="How many to send: the texts given, repeatedly, or message-1, ...",
            show_default=False,
        ),
    ] = None,
    deliver_after: Annotated[
        int | None,
        typer.Option(
            parser=parse_duration,
            metavar="DURATION",
            help="From the publish time: 250ms, 10s, 5m, 2h, 1d.",
            show_default=False,
        ),
    ] = None,
    deliver_at: Annotated[
        int | None,
        typer.Option(
            parser=parse_due_time,
            metavar="TIME",
            help="ISO 8601 with a zone, or ms since the epoch.",
            show_default=False,
        ),
    ] = None,
    expire_after: Annotated[
        int | None,
        typer.Option(
            parser=parse_duration,
            metavar="DURATION",
            help="How long after it is due it is sent at the latest: 10s, 5m.",
            show_default=False,
        ),
    ] = None,
    expire_at: Annotated[
        int | None,
        typer.Option(
            parser=parse_due_time, metavar="TIME", help="From then on it is not sent any more.", show_default=False
        ),
    ] = None,
    key: Annotated[str | None, typer.Option(help="The messages' key.", show_default=False)] = None,
    properties: Annotated[
        list[str] | None, typer.Option("--property", metavar="KEY=VALUE", help="Repeatable.", show_default=False)
    ] = None,
    repeat: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Deliver each again and again: a cron expression, @every 90s, or an RRULE.",
            show_default=False,
        ),
    ] = None,
    time_zone: Annotated[
        str | None,
        typer.Option(metavar="ZONE", help="The zone of --repeat, as Europe/Berlin. Default UTC.", show_default=False),
    ] = None,
    repeat_until: Annotated[
        int | None,
        typer.Option(parser=parse_due_time, metavar="TIME", help="No occurrence is later.", show_default=False),
    ] = None,
    repeat_times: Annotated[
        int | None, typer.Option(min=1, help="The number of occurrences.", show_default=False)
    ] = None,
    misfire: Annotated[
        Misfire | None,
        typer.Option(help="What happens to missed occurrences; once: one delivery for all.", show_default=False),
    ] = None,
    batch: Annotated[bool, typer.Option("--batch", help="Let one entry hold several messages.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Send messages and print the id of each: ledger:entry:partition:batchIndex."""
    from tracker.commands.decode import resolve_topic

    if deliver_after is not None and deliver_at is not None:
        raise typer.BadParameter("give --deliver-after or --deliver-at, not both")
    if not message and count is None:
        raise typer.BadParameter("give messages with -m, a number of them with -n, or both")
    made = {} if deliver_after is None else {DELIVER_AFTER: str(deliver_after)}
    made |= {} if deliver_at is None else {DELIVER_AT: str(deliver_at)}
    made |= {} if expire_after is None else {EXPIRE_AFTER: str(expire_after)}
    made |= {} if expire_at is None else {EXPIRE_AT: str(expire_at)}
    _check_time(made)
    if repeat is not None and expire_at is not None:
        raise typer.BadParameter("--expire-at does not go with --repeat: --expire-after is for each occurrence")
    made |= recurrence_properties(repeat, time_zone, repeat_until, repeat_times, misfire)
    sent_properties = _joined(parse_properties(properties), made)
    total = count or len(message or [])
    texts = islice(cycle(message), total) if message else (f"message-{number}" for number in range(1, total + 1))
    options = global_options(context)
    log_file = "/dev/stderr" if options.verbose else os.devnull
    ids = send(options.settings.pulsar, topic, texts, total, key, sent_properties, batch, log_file)
    show(output, ids, "\n".join(ids))
    sources = {route.source for route in options.settings.routes}
    if sources and resolve_topic(topic, sources)[0] is None:
        print(f"warning: no route in the settings is for {topic}: nobody delivers what is sent there", file=sys.stderr)


def _joined(given: dict[str, str], made: dict[str, str]) -> dict[str, str]:
    """Returns the properties that were given, and those that options make.

    Raises:
        typer.BadParameter: one is both, or there are two times, of which the job takes deliverAt.
    """
    taken = made.keys() | (_TIMES if made.keys() & _TIMES else set())
    if twice := [name for name in given if name in taken]:
        raise typer.BadParameter(f"the property {twice[0]} is given by --property and by an option of its own")
    return given | made


def _check_time(properties: dict[str, str]) -> None:
    """Raises typer.BadParameter where a message that is sent now would be rejected for its time."""
    from tracker.due_time import BadScheduleError, expires_at
    from tracker.due_time import deliver_at as due

    now = time.time_ns() // 1_000_000
    try:
        expires_at(properties, due(properties, now, now))
    except BadScheduleError as error:
        raise typer.BadParameter(str(error)) from None


def send(
    settings: PulsarSettings,
    topic: str,
    texts: Iterable[str],
    total: int,
    key: str | None,
    properties: dict[str, str],
    batch: bool,
    log_file: str = os.devnull,
) -> list[str]:
    """Sends messages, in order, and returns when the broker has answered for each.

    Args:
        settings: the `pulsar` section.
        topic: full name of the topic.
        texts: the payloads.
        total: the number of texts.
        key: key of all messages; None: none.
        properties: properties of all messages.
        batch: whether several messages may share an entry.
        log_file: the file for the client's errors.

    Returns:
        the ids, ledger:entry:partition:batchIndex, in the order of the texts.

    Raises:
        PulsarError: the broker can't be reached, or has refused some of the messages.
    """
    import pulsar
    from rich.console import Console
    from rich.progress import Progress

    from broker.client import FIRST_SEQUENCE_ID, PulsarError, connect
    from broker.entries.message_ids import MessageRef

    ids = [""] * total
    failures: list[str] = []
    answered = threading.Semaphore(0)

    def on_answer(position: int) -> Any:
        # An exception in here would hang the client.
        def record(result: pulsar.Result, message_id: Any) -> None:
            if result == pulsar.Result.Ok:
                ids[position] = str(MessageRef.of(message_id))
            else:
                failures.append(str(result).removeprefix("Result."))
            answered.release()

        return record

    client = connect(settings, log_file=log_file, operation_timeout_seconds=CONNECT_TIMEOUT_SECONDS)
    try:
        producer = client.create_producer(
            topic, batching_enabled=batch, block_if_queue_full=True, initial_sequence_id=FIRST_SEQUENCE_ID
        )
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal or total < SHOW_PROGRESS_FROM) as progress:
            task = progress.add_task("sending", total=total)
            for position, text in enumerate(texts):
                producer.send_async(text.encode(), on_answer(position), properties=properties, partition_key=key)
                if position % SHOW_PROGRESS_FROM == 0:
                    progress.update(task, completed=position)
            producer.flush()
            for _ in range(total):
                answered.acquire()
            progress.update(task, completed=total)
    except pulsar.PulsarException as error:
        raise client_error(f"can't send to {topic}", settings, error) from error
    finally:
        client.close()
    if failures:
        raise PulsarError(f"{len(failures)} of {total} messages were not sent to {topic}: {failures[0]}")
    return ids


def client_error(what: str, settings: PulsarSettings, error: Exception) -> PulsarError:
    """Returns the error for one of Pulsar's client: what can't be done, why, and what to look at."""
    from broker.client import PulsarError

    # Its text without the prefix: `ConnectError` for `Pulsar error: ConnectError`.
    reason = str(error).removeprefix("Pulsar error: ") or type(error).__name__
    return PulsarError(
        f"{what} by {settings.service_url}: {reason}; is the broker up, the topic's name right, and the token valid? "
        "(--verbose shows the client's log)"
    )
