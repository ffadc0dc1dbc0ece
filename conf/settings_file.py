"""Where in the settings file, or in which environment variable, a setting is that is wrong."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from conf.secrets import is_secret


def repeated(path: Path) -> list[str]:
    """Returns a line for each setting that is twice in a file, of which YAML would take the last one.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    lines: list[str] = []

    def look(node: yaml.Node | None, name: str) -> None:
        known: dict[str, int] = {}
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = f"{name}.{key.value}".lstrip(".")
                if key.value in known and key.value != "<<":
                    first = known[key.value]
                    lines.append(f"{path}:{key.start_mark.line + 1}: {inner} is there twice, first in line {first}")
                known.setdefault(key.value, key.start_mark.line + 1)
                look(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                look(item, f"{name}.{i}")

    look(yaml.compose(path.read_text()), "")
    return lines


def unknown_variables(prefix: str, sections: Collection[str]) -> list[str]:
    """Returns a line for each environment variable of a setting whose section there is none of.

    Those that only begin like settings, such as DELAYLAKE_CACHE, are something else's.

    Args:
        prefix: of the environment variables that are settings.
        sections: the names of all sections.
    """
    lines = []
    for variable, value in sorted(os.environ.items()):
        section, separator, name = variable.lower().removeprefix(prefix.lower()).partition("__")
        if variable.upper().startswith(prefix) and separator and section not in (*sections, "routes"):
            setting = f"{section}.{name.replace('__', '.')}"
            shown = "" if is_secret(setting) else f" = {value!r}"
            lines.append(f"{variable}: {setting}{shown}: no such setting")
    return lines


def wrong_settings(error: ValidationError, path: Path, prefix: str) -> list[str]:
    """Returns a line for each wrong setting: where it is, its name and value, and what is allowed.

    Args:
        error: of the settings' validation.
        path: the settings file.
        prefix: of the environment variables that are settings.
    """
    tree = yaml.compose(path.read_text())
    errors = error.errors()
    lines = []
    for one in errors:
        loc = one["loc"]
        place, is_given = _place(loc, path, tree, prefix)
        # What only follows from another one: a default that is made of it, or a list without it.
        is_cut = one["type"] == "too_short" and any(e["loc"][: len(loc)] == loc != e["loc"] for e in errors)
        if (is_given or one["type"] == "missing") and not is_cut:
            lines.append(f"{place}: {_wrong(one)}")
    return lines or [f"{path}: {_wrong(errors[0])}"]


def _wrong(error: ErrorDetails) -> str:
    name = ".".join(str(part) for part in error["loc"]) or "settings"
    if error["type"] == "extra_forbidden":
        return f"{name} = {error['input']!r}: no such setting"
    hidden = isinstance(error["input"], dict | BaseModel) or "secret" in name
    hidden = hidden or (name.startswith("spark.conf.") and is_secret(name))
    shown = "" if hidden else f" = {error['input']!r}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{name}{shown}: {message[0].lower()}{message[1:]}"


def _place(at: tuple[str | int, ...], path: Path, tree: yaml.Node | None, prefix: str) -> tuple[str, bool]:
    """Returns where a setting, or what it is part of, is: an environment variable, or file and line; and if itself is.

    Args:
        at: its name, by parts.
        path: the settings file.
        tree: what is in it.
        prefix: of the environment variables that are settings.
    """
    environment = {name.upper() for name in os.environ}
    for end in range(len(at), 0, -1):
        variable = (prefix + "__".join(map(str, at[:end]))).upper()
        if variable in environment:
            return variable, True
    place = str(path)
    for part in at:
        if isinstance(tree, yaml.MappingNode) and (
            found := [pair for pair in tree.value if pair[0].value == str(part)]
        ):
            node, tree = found[-1]
        elif isinstance(tree, yaml.SequenceNode) and isinstance(part, int) and part < len(tree.value):
            node = tree = tree.value[part]
        else:
            return place, False
        place = f"{path}:{node.start_mark.line + 1}"
    return place, True
