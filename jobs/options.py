"""The parts that all commands share: the global options and the output."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import tzinfo
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.logs import LogFormat

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from admin.control.rest_client import RestClient
    from conf.settings import Settings
    from warehouse.delta.engine import Engine


class Output(StrEnum):
    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", help="How to print: for people, or JSON alone on stdout.")]


class EngineName(StrEnum):
    SPARK = "spark"
    LOCAL = "local"


# With this many rows or more a Spark application is worth its start: see docs/scale.md.
SPARK_ROWS = 50_000_000

EngineOption = Annotated[
    EngineName | None,
    typer.Option(
        "--engine",
        help="Where the heavy work is done: on the cluster of spark.master, or in this process. "
        "By default on a cluster if there are 50 million rows or more.",
        show_default=False,
    ),
]


@dataclass
class GlobalOptions:
    """The global options as they were given, before or after the command; None: not given."""

    config: Path | None = None
    verbose: bool = False
    admin_url: str | None = None
    log_format: LogFormat | None = None
    time_zone: str | None = None

    @property
    def api_url(self) -> str | None:
        """The admin API to use; None: the control topic and the tables."""
        return self.admin_url or self.settings.api.url

    @property
    def zone(self) -> tzinfo | None:
        """The time zone of times in text; None: the machine's."""
        from conf.times import parse_zone

        return parse_zone(self.time_zone or "UTC")

    @cached_property
    def settings(self) -> Settings:
        """The settings, read at the first access.

        Raises:
            SettingsError: see `load_settings`.
        """
        from conf.settings import load_settings

        return load_settings(self.config)


def global_options(context: typer.Context) -> GlobalOptions:
    options: GlobalOptions = context.find_root().obj
    return options


def rest_client(options: GlobalOptions, url: str) -> RestClient:
    from admin.control.rest_client import RestClient

    return RestClient(url, options.settings.api.max_ids_per_call, options.settings.pulsar)


def engine_of(settings: Settings, chosen: EngineName | None) -> AbstractContextManager[Engine]:
    """Returns the chosen engine; None: Spark for much work if the settings have a cluster, else this process."""
    from contextlib import nullcontext

    from warehouse.delta.engine import LOCAL

    if chosen is EngineName.LOCAL or (chosen is None and settings.spark.master.startswith("local")):
        return nullcontext(LOCAL)
    from streaming.spark_engine import SparkEngine

    return SparkEngine(settings, min_rows=SPARK_ROWS if chosen is None else 0)


def show(output: Output, value: Any, text: str) -> None:
    """Prints a command's result on stdout: `text`, or `value` as one line of JSON."""
    print(json.dumps(value) if output is Output.JSON else text, flush=True)
