"""Writes docs/reference.md (commands, settings, tables) and docs/rest.md (the API, as OpenAPI has it) from the code.

usage: make_reference.py [--check]    with --check: exit status 1 where one of them is not current
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import typer
from delaylake import Client
from pydantic import BaseModel, SecretStr

from admin.app import create_app
from conf.settings import Settings
from jobs import cli
from warehouse.message_schemas import COLUMNS
from warehouse.schemas import LATER, SCHEMAS

DOCS = Path(__file__).parent
_MANY_CALLS = 5  # what so many calls say alike is said once


def commands(command: Any, path: str = "delaylake") -> Iterator[str]:
    children = getattr(command, "commands", {})
    for name, child in children.items():
        if not child.hidden:
            yield from commands(child, f"{path} {name}")
    if children:
        return
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help" and not p.hidden]
    yield f"### `{' '.join([path, *((a.metavar or a.name.upper()) for a in arguments)])}`\n"
    yield f"{' '.join((command.help or '').split())}\n"
    if options:
        yield "| option | |\n|---|---|"
        for option in options:
            names = ", ".join(f"`{name}`" for name in option.opts)
            yield f"| {names} | {' '.join((option.help or '').split()).replace('|', '/')} |"
        yield ""


def calls(api: dict[str, Any], shared: Container[str]) -> Iterator[str]:
    """Yields what OpenAPI says of each call: what it does, its parameters, an example of its body, its answers.

    Args:
        api: the OpenAPI document.
        shared: paragraphs that are said once for all calls.
    """
    tag = None
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                yield f"## {tag.capitalize()}\n"
            yield f"### {operation['summary']}\n\n`{method.upper()} {path}`\n"
            if own := [text for text in _paragraphs(operation) if text not in shared]:
                yield "\n\n".join(own) + "\n"
            # Those of the path are in all calls of topics.
            named = [one for one in operation.get("parameters", ()) if one["in"] != "path"]
            if named:
                yield "| parameter | | |\n|---|---|---|"
                for one in named:
                    kind = f"{_type(one['schema'])}{', required' if one.get('required') else ''}"
                    yield f"| `{one['name']}`, in {one['in']} | {kind} | {_cell(one.get('description', ''))} |"
                yield ""
            yield from _bodies(api, operation)
            yield "| status | |\n|---|---|"
            for code, answer in sorted(operation["responses"].items()):
                yield f"| {code} | {_cell(answer['description'])} |"
            yield ""


def _paragraphs(operation: dict[str, Any]) -> list[str]:
    text = operation.get("description", "")
    return text.split("\n\n") if text else []


def _bodies(api: dict[str, Any], operation: dict[str, Any]) -> Iterator[str]:
    content = operation.get("requestBody", {}).get("content", {})
    given = content.get("application/json", {})
    schema = _found(api, given.get("schema", {}))
    examples = given.get("examples") or schema.get("examples") or []
    shown = [one["value"] for one in examples.values()] if isinstance(examples, dict) else list(examples)
    if "example" in given:
        shown.append(given["example"])
    if "$ref" in given.get("schema", {}):
        yield "Fields of the body, as JSON:\n"
        yield "| field | | |\n|---|---|---|"
        for name, field in _fields(api, schema):
            yield f"| `{name}` | {_type(field)} | {_cell(field.get('description', ''))} |"
        yield ""
    if shown:
        lines = "\n".join(json.dumps(one) for one in shown)
        form = ", or as a form" if len(content) > 1 else ""
        yield f"A body is, as JSON{form}, for example:\n\n```json\n{lines}\n```\n"


def _found(api: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = api["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], schema)
    return found


def _fields(api: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema["properties"].items():
        found = _found(api, field)
        if "properties" in found and "$ref" in field:
            yield from _fields(api, found, f"{path}{name}.")
        else:
            yield f"{path}{name}", found


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(kind for one in schema["anyOf"] if (kind := _type(one)) != "null")
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    kind = str(schema.get("type", "any"))
    return f"{kind} of {_type(schema['items'])}" if kind == "array" else kind


def _cell(text: str) -> str:
    """Returns a text as it can stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def rest() -> str:
    with tempfile.TemporaryDirectory() as folder:
        api = create_app(Settings(warehouse=folder, routes=())).openapi()
    said = Counter(text for of in api["paths"].values() for one in of.values() for text in _paragraphs(one))
    shared = [text for text, calls_with in said.items() if calls_with >= _MANY_CALLS]
    lines = [
        "# REST reference\n",
        "Made by `docs/make_reference.py` from the API's own OpenAPI document (`/openapi.json`; `/docs` is a page to"
        " try it). How it goes with Pulsar's, who may do what, and examples: [Admin API](admin-api.md).\n",
        'An error\'s body is `{"reason": "..."}`. `{tenant}`, `{namespace}`, `{topic}` and `{subscription}` are'
        " URL-encoded; a topic may be a partition's.\n",
        *(f"{text}\n" for text in shared),
        *calls(api, shared),
    ]
    return "\n".join(lines).rstrip() + "\n"


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
        text = re.sub(r"Annotated\[str, FieldInfo\(.*\)\]", "str", text)
        text = re.sub(r"Union\[int, Literal\['(\w+)'\]\]", r"int or `\1`", text)
        text = "str or None" if text == "Optional[str]" else text.replace("|", "or")
        text = re.sub(r"\b(pathlib|pydantic\.types|conf\.\w+)\.", "", text)
        yield f"| `{path}{name}` | {text} | {f'`{shown}`' if shown != '' else ''} |"


def methods() -> Iterator[str]:
    """Yields a row for each method of the Python client: what it takes, and the first paragraph about it."""
    for name, method in sorted(inspect.getmembers(Client, inspect.isfunction)):
        if not name.startswith("_"):
            own = list(inspect.signature(method).parameters.values())[1:]
            takes = ", ".join(one.name + "=" * (one.kind is inspect.Parameter.KEYWORD_ONLY) for one in own)
            yield f"| `{name}({takes})` | {_cell((inspect.getdoc(method) or '').partition(chr(10) * 2)[0])} |"


def reference() -> str:
    lines = [
        "# Reference\n",
        "The API has [a page of its own](rest.md). Made from the code by `docs/make_reference.py`.\n",
        "## Commands\n",
        "Every command takes `-h`, `--config FILE`, `--verbose`, `--admin-url URL`, `--log-format text|json` "
        "and, unless it has one of its own, `--time-zone ZONE` (of times in text) too.\n",
        *commands(typer.main.get_command(cli.app)),
        "## Python client\n",
        "The methods of `delaylake.Client`; those of `AsyncClient` are the same, to be awaited. More on them, and their"
        " errors: [Clients](clients.md).\n",
        "| method | |\n|---|---|",
        *methods(),
        "\n## Settings\n",
        "Each also as an environment variable: `release.lanes` is `DELAYLAKE_RELEASE__LANES`. What they mean:"
        " [Settings](settings.md).\n",
        "| setting | type | default |\n|---|---|---|",
        *fields(Settings),
        "\n## Tables\n",
        "What they mean: [Tables](tables.md).\n",
    ]
    for name, schema in {**SCHEMAS, "schemas": COLUMNS, **LATER}.items():
        columns = ", ".join(f"`{field.name}` {field.type}" for field in schema)
        lines.append(f"**`{name}`**: {columns}\n")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    pages = {DOCS / "reference.md": reference(), DOCS / "rest.md": rest()}
    if "--check" in sys.argv:
        sys.exit(any(not file.exists() or file.read_text() != text for file, text in pages.items()))
    for file, text in pages.items():
        file.write_text(text)
