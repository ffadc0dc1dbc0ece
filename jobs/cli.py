"""The command line `delaylake`. Commands import what they need only when they run, so that `--help` is quick."""

from __future__ import annotations

import copy
import runpy
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer

from conf.errors import DelayLakeError, one_line
from jobs.commands import api, demo, dev, run, status, version
from jobs.commands import broker as broker_commands
from jobs.commands.messages import consume, pending, produce, schedules, topics
from jobs.commands.tables import audit, backup, maintain, rebuild, sql
from jobs.commands.tables import import_ as importing
from jobs.logs import LogFormat
from jobs.options import GlobalOptions, global_options

# Options that may be given before or after the command.
GLOBAL_OPTIONS = ("config", "verbose", "admin_url", "log_format", "time_zone")

app = typer.Typer(
    name="delaylake",
    help="Delayed message delivery for Apache Pulsar, kept in Spark state and Delta tables.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(broker_commands.app, name="broker")
app.add_typer(topics.app, name="topics")
app.add_typer(schedules.app, name="schedules")
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.command("pending")(pending.pending)
app.command("run")(run.run)
app.command("status")(status.status)
app.command("rebuild")(rebuild.rebuild)
app.command("import")(importing.import_messages)
app.command("maintain")(maintain.maintain)
app.command("backup")(backup.backup)
app.command("sql")(sql.sql)
app.command("audit")(audit.audit)
app.command("api")(api.api)
app.command("demo")(demo.demo)
app.command("dev")(dev.dev)
app.command("version")(version.version)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"delaylake {version_of('delaylake')}")
        raise typer.Exit


def _zone_name(name: str) -> str:
    from conf.times import parse_zone

    try:
        parse_zone(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return name


@app.callback()
def _globals(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="The settings file, instead of DELAYLAKE_CONFIG or conf/delaylake.yaml.", show_default=False),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the traceback of an error.")] = False,
    admin_url: Annotated[
        str | None,
        typer.Option(
            help="The admin API that `topics`, `pending` and `schedules` use, instead of control topic and tables.",
            show_default=False,
        ),
    ] = None,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(help="How `run` and `api` log: text (the default), or JSON, a line each.", show_default=False),
    ] = None,
    time_zone: Annotated[
        str | None,
        typer.Option(
            parser=_zone_name,
            metavar="ZONE",
            help="The zone of times in text: UTC (the default), local, or a name as Europe/Berlin.",
            show_default=False,
        ),
    ] = None,
    shows_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    options = global_options(context)
    options.config = config or options.config
    options.verbose = verbose or options.verbose
    options.admin_url = admin_url or options.admin_url
    options.log_format = log_format or options.log_format
    options.time_zone = time_zone or options.time_zone


def _take_global_options_anywhere(group: Any) -> None:
    """Adds a group's global options to all of its commands, so that they may also follow the command.

    A command's own option of the same name stays.
    """
    options = [parameter for parameter in group.params if parameter.name in GLOBAL_OPTIONS]

    def store(context: typer.Context, parameter: Any, value: Any) -> None:
        if value:
            setattr(global_options(context), parameter.name, value)

    def extend(command: Any) -> None:
        names = {parameter.name for parameter in command.params}
        for option in (option for option in options if option.name not in names):
            own = copy.copy(option)
            own.expose_value, own.callback = False, store
            command.params.append(own)
        for child in getattr(command, "commands", {}).values():
            extend(child)

    for child in group.commands.values():
        extend(child)


def main() -> None:
    """The console entry point. Exit status: 0 done, 1 failed, 2 wrong usage; each error is one line on stderr."""
    options = GlobalOptions()
    command = typer.main.get_command(app)
    _take_global_options_anywhere(command)
    try:
        status = command.main(prog_name="delaylake", obj=options, standalone_mode=False)
    except typer.TyperException as error:
        status = error.exit_code
        if message := error.format_message().replace("Value error, ", "").removesuffix("."):
            where = getattr(error, "ctx", None)
            _print_error(f"{message} (see {where.command_path} --help)" if where else message)
    except typer.Abort:
        status = _print_error("aborted")
    except Exception as error:
        if options.verbose:
            raise
        lines = [f"{type(error).__name__}: {error} (unexpected: --verbose shows where)"]
        if isinstance(error, DelayLakeError):
            lines = error.lines
        status = max(map(_print_error, lines))
    sys.exit(status or 0)


def _print_error(message: str) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return 1


if __name__ == "__main__":  # submitted to Spark by this file's name
    runpy.run_module("jobs", run_name="__main__")
