"""`delaylake topics redrive` delivers dead letters once more."""

from __future__ import annotations

import getpass
import uuid
from datetime import tzinfo
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.times import time_text
from jobs.commands.messages.by_filter import BulkError, DryRun, Max, Timeout, Yes
from jobs.commands.messages.filter_options import TIME, Key, Properties, Topic, checked
from jobs.options import GlobalOptions, Output, OutputOption, global_options, rest_client, show
from jobs.parsers import parse_properties, parse_time
from jobs.text_table import table_text

if TYPE_CHECKING:
    from rich.console import Console

    from admin.control.dead_letters import DeadLetterFilter

_SHOWN = 20  # dead letters that are shown before they are sent back


def redrive(
    context: typer.Context,
    topic: Topic,
    subscription: Annotated[str, typer.Option("-s", "--subscription", help="The subscription with the dead letters.")],
    key: Key = None,
    properties: Properties = None,
    triplets: Annotated[
        list[str] | None,
        typer.Option("--messageId-triplet", help="Their delaylake.messageId, ledger:entry[:batchIndex]; repeatable."),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(help="A text in one of the reasons for their retries.", show_default=False)
    ] = None,
    published_after: Annotated[
        int | None,
        typer.Option(parser=parse_time, metavar="TIME", help=f"Dead letters since then: {TIME}", show_default=False),
    ] = None,
    published_before: Annotated[
        int | None,
        typer.Option(parser=parse_time, metavar="TIME", help=f"Dead letters before then: {TIME}", show_default=False),
    ] = None,
    dry_run: DryRun = False,
    max_matched: Max = 10_000,
    yes: Yes = False,
    request_id: Annotated[
        str | None,
        typer.Option(
            help="The id of a re-drive that was broken off: dead letters that it sent back are not sent again.",
            show_default=False,
        ),
    ] = None,
    timeout: Timeout = 600,
    output: OutputOption = Output.TEXT,
) -> None:
    """Deliver those dead letters of a subscription once more to which all options given apply.

    They go to the subscription's destination at once, and their attempts begin again.
    """
    from rich.console import Console

    from admin.control.dead_letters import DeadLetterFilter

    wanted = checked(
        DeadLetterFilter,
        subscription=subscription,
        key=key,
        properties=parse_properties(properties),
        message_ids=triplets or None,
        reason=reason,
        published_from=published_after,
        published_before=published_before,
    )
    options, console = global_options(context), Console(stderr=True)
    asked = _RedriveCall(options, topic, wanted, max_matched, request_id or uuid.uuid4().hex, timeout, console)
    found = asked.call(dry_run=True) if dry_run or not yes else {}
    if dry_run:
        text = [f"{found['matched']:,} dead letters match", *_unreadable(found)]
        text += [_text(found["messages"][:_SHOWN], options.zone)] if found["matched"] else []
        show(output, found, "\n".join(text))
        return
    if found.get("matched"):
        if not console.is_terminal:
            raise BulkError(
                f"{found['matched']:,} dead letters match, and nobody can be asked: give --yes or --dry-run"
            )
        console.print(_text(found["messages"][:_SHOWN], options.zone), highlight=False, markup=False, emoji=False)
        typer.confirm(f"re-drive {found['matched']:,} dead letters?", abort=True, err=True)
    done = asked.call(dry_run=False)
    lines = [f"{done['matched']:,} dead letters matched", f"{done['redriven']:,} re-driven, as {done['requestId']}"]
    if done["alreadyRedriven"]:
        lines.append(f"{done['alreadyRedriven']:,} were re-driven before")
    lines += _unreadable(done)
    show(output, done, "\n".join(lines))
    if done["refused"]:
        raise BulkError(
            f"{done['refused']:,} were not sent back: the topic does not take messages of their size (or their schema:"
            " the log says why)"
        )


class _RedriveCall:
    """A call of a re-drive: to the admin API if one is named, else done by this process."""

    def __init__(
        self,
        options: GlobalOptions,
        topic: str,
        wanted: DeadLetterFilter,
        max_matched: int,
        request_id: str,
        timeout: float,
        console: Console,
    ) -> None:
        self._options = options
        self._topic = topic
        self._wanted = wanted
        self._max_matched = max_matched
        self._request_id = request_id
        self._timeout = timeout
        self._console = console

    def call(self, dry_run: bool) -> dict[str, Any]:
        """Returns the counts, as the admin API's JSON.

        Raises:
            ControlError, PendingError: see `admin.control.redrive.Redrive`.
        """
        from rich.progress import Progress

        from admin.control.redrive import Redrive

        if self._options.api_url is not None:
            with rest_client(self._options, self._options.api_url) as client:
                wanted = self._wanted.model_dump(by_alias=True, exclude_defaults=True, mode="json")
                content = {"filter": wanted, "dryRun": dry_run, "max": self._max_matched}
                return client.redrive(self._topic, content, self._request_id, self._timeout)
        with Progress(console=self._console, disable=not self._console.is_terminal) as progress:
            task = progress.add_task("dead letters", total=None)
            asked = Redrive(
                self._options.settings,
                getpass.getuser(),
                self._topic,
                self._wanted,
                self._request_id,
                self._max_matched,
                on_progress=lambda n: progress.update(task, completed=n),
            )
            return asked.dry_run() if dry_run else asked.run()


def _unreadable(found: dict[str, Any]) -> list[str]:
    n = found.get("unreadable", 0)
    return [f"{n:,} entries of the topic of dead letters can't be read, and stay there"] if n else []


def _text(letters: list[dict[str, Any]], zone: tzinfo | None) -> str:
    rows = [
        [time_text(one["publishTime"], zone), one["messageId"], one["key"] or "", (one["reasons"] or [""])[-1]]
        for one in letters
    ]
    return table_text(["dead since", "message", "key", "last reason"], rows)
