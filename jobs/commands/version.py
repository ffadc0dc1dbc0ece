"""`delaylake version`: shows the versions of the program and of its time zones."""

from __future__ import annotations

from importlib.metadata import version as version_of

import typer

from jobs.options import Output, OutputOption, show


def version(context: typer.Context, output: OutputOption = Output.TEXT) -> None:
    """Show the versions of the program, and of the IANA database whose time zones it uses, not the machine's."""
    from conf.time_zones import TIME_ZONE_DATA_VERSION

    found = {"version": version_of("delaylake"), "timeZones": TIME_ZONE_DATA_VERSION}
    show(output, found, f"delaylake {found['version']}\ntime zones {found['timeZones']}")
