"""Writes docs/reference.md: commands, REST calls, settings and tables, as the code has them.

usage: make_reference.py [--check]    with --check: exit status 1 where the file is not current
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, SecretStr

from admin.app import create_app
from conf.settings import Settings
from jobs import cli
from warehouse.message_schemas import COLUMNS
from warehouse.schemas import EXPIRED, REFUSALS, SCHEMAS

FILE = Path(__file__).with_name("reference.md")
_GLOBAL = ("help", *cli.GLOBAL_OPTIONS)


def commands(command: Any, path: str = "delaylake") -> Iterator[str]:
    children = getattr(command, "commands", {})
    for name, child in children.items():
        if not child.hidden:
            yield from commands(child, f"{path} {name}")
    if children:
        return
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name not in _GLOBAL and not p.hidden]
    yield f"### `{' '.join([path, *((a.metavar or a.name.upper()) for a in arguments)])}`\n"
    yield f"{' '.join((command.help or '').split())}\n"
    if options:
        yield "| option | |\n|---|---|"
        for option in options:
            names = ", ".join(f"`{name}`" for name in option.opts)
            yield f"| {names} | {' '.join((option.help or '').split()).replace('|', '/')} |"
        yield ""


def calls(settings: Settings) -> Iterator[str]:
    for path, operations in create_app(settings).openapi()["paths"].items():
        for method, operation in operations.items():
            codes = ", ".join(sorted(operation["responses"]))
            yield f"| {method.upper()} `{path}` | {operation['summary']} | {codes} |"


def fields(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{path}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        shown = (
            "" if default is None or isinstance(default, SecretStr) or repr(default).startswith("Pydantic") else default
        )
        text = getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind).replace("typing.", "")
        text = "str or None" if "Annotated[str" in text else text.replace("|", "or")
        text = re.sub(r"\b(pathlib|pydantic\.types|conf\.settings)\.", "", text)
        yield f"| `{path}{name}` | {text} | {f'`{shown}`' if shown != '' else ''} |"


def reference() -> str:
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(warehouse=folder, routes=())
        rest = list(calls(settings))
    lines = [
        "# Reference\n",
        "Made from the code by `docs/make_reference.py`.\n",
        "## Commands\n",
        "Every command takes `-h`, `--config FILE`, `--verbose`, `--admin-url URL`, `--log-format text|json` "
        "and `--time-zone ZONE` (of times in text) too.\n",
        *commands(typer.main.get_command(cli.app)),
        "## REST\n",
        "| call | does | answers |\n|---|---|---|",
        *rest,
        "\n## Settings\n",
        "Each also as an environment variable: `release.lanes` is `DELAYLAKE_RELEASE__LANES`. What they mean:"
        " [Settings](settings.md).\n",
        "| setting | type | default |\n|---|---|---|",
        *fields(Settings),
        "\n## Tables\n",
        "What they mean: [Tables](tables.md).\n",
    ]
    for name, schema in {**SCHEMAS, "expired": EXPIRED, "refusals": REFUSALS, "schemas": COLUMNS}.items():
        columns = ", ".join(f"`{field.name}` {field.type}" for field in schema)
        lines.append(f"**`{name}`**: {columns}\n")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    text = reference()
    if "--check" in sys.argv:
        sys.exit(FILE.read_text() != text)
    FILE.write_text(text)
