"""Finds the line of the settings file, or the environment variable, of each wrong setting."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterable
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from conf.errors import one_line
from conf.secrets import is_secret

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 200
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict = 3, 6, 6

# What is wanted, in the words of YAML instead of Python's.
_WANTED = {
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list: [...], in the environment as JSON"),
    **dict.fromkeys(("model_type", "dict_type"), "must be a mapping: {name: value}, in the environment as JSON"),
}

_TEXT, _NULL, _MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "null", "merge"))


class SettingsTree:
    """The YAML nodes of a settings file, and the errors that are found before settings are made of it.

    Attributes:
        root: the root node; None: the file is empty.
        wrong: a line for each error that prevents making settings of it.
        repeated: a line for each setting that is there twice: YAML would take the last one.

    Raises:
        OSError, UnicodeDecodeError, yaml.YAMLError: the file can't be read, or is not YAML.
        RecursionError: it is nested too deeply.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._constructor = yaml.constructor.SafeConstructor()
        self._done: set[int] = set()
        self.root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
        self.wrong: list[str] = []
        self.repeated: list[str] = []
        if isinstance(self.root, yaml.MappingNode):
            self._look(self.root, "", ())
        elif self.root is not None and self.root.tag != _NULL:
            kind = "a list" if isinstance(self.root, yaml.SequenceNode) else "a single value"
            self.wrong.append(
                f"{self._at(self.root)}: settings are a mapping, as `warehouse: file:...`, and not {kind}"
            )

    def _at(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"

    def _look(self, node: yaml.Node, name: str, within: tuple[yaml.Node, ...]) -> None:
        if any(node is outer for outer in within):
            self.wrong.append(f"{self._at(node)}: {name} is a part of itself")
        if id(node) in self._done:  # an alias
            return
        self._done.add(id(node))
        if isinstance(node, yaml.MappingNode):
            self._look_at_pairs(node, name, (*within, node))
        elif isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                self._look(item, f"{name}.{i}", (*within, node))
        else:
            try:
                self._constructor.construct_object(node)
            except ValueError as error:
                shown = "" if is_secret(name) else f" = {node.value!r}"
                self.wrong.append(f"{self._at(node)}: {name}{shown}: {error}")

    def _look_at_pairs(self, node: yaml.MappingNode, name: str, within: tuple[yaml.Node, ...]) -> None:
        known: dict[str, str] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                self._look(value, name, within)
                continue
            if key.tag != _TEXT:
                written = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                self.wrong.append(f"{self._at(key)}: {name or 'settings'}: {written} is no name of a setting")
                continue
            inner, line = f"{name}.{key.value}".lstrip("."), str(key.start_mark.line + 1)
            if key.value in known:
                self.repeated.append(f"{self._at(key)}: {inner} is there twice, first in line {known[key.value]}")
            known.setdefault(key.value, line)
            self._look(value, inner, within)


def unreadable(error: Exception, path: Path) -> str:
    """Returns the error line for a settings file that can't be read, with place and reason."""
    line = None
    reason = one_line(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line = error.problem_mark.line
        reason = one_line(", ".join(filter(None, (error.context, error.problem))))
    elif isinstance(error, yaml.reader.ReaderError):
        line, reason = path.read_text()[: error.position].count("\n"), one_line(error).split(' in "')[0]
    elif isinstance(error, UnicodeDecodeError):
        line = error.object[: error.start].count(b"\n")
    elif isinstance(error, RecursionError):
        reason = "nested too deeply"
    return f"{path}: {reason}" if line is None else f"{path}:{line + 1}: {reason}"


def wrong_settings(error: ValidationError, path: Path, tree: yaml.Node | None, prefix: str) -> list[str]:
    """Returns a line for each wrong setting, with its place, name and value, and what is allowed.

    Args:
        error: the error of the settings' validation.
        path: the settings file.
        tree: the file's root node.
        prefix: the prefix of environment variables that are settings.
    """
    errors = error.errors()
    lines = []
    for one in errors:
        loc = one["loc"]
        place, is_given = _place(loc, path, tree, prefix)
        # Errors that only follow from others are left out: of a default made of a wrong value, or a list without it.
        is_cut = one["type"] == "too_short" and any(e["loc"][: len(loc)] == loc != e["loc"] for e in errors)
        if (is_given or one["type"] == "missing") and not is_cut:
            lines.append(f"{place}: {_wrong(one)}")
    return lines or [f"{path}: {_wrong(errors[0])}"]


def in_order(lines: Iterable[str], path: Path) -> list[str]:
    """Sorts lines on a settings file by the line of the file that they name; what names none comes first."""
    at = re.compile(rf"{re.escape(str(path))}:(\d+): ")
    return sorted(lines, key=lambda line: int(found[1]) if (found := at.match(line)) else 0)


def _wrong(error: ErrorDetails) -> str:
    name = ".".join(str(part) for part in error["loc"]) or "settings"
    if error["type"] == "extra_forbidden":
        given = "" if isinstance(error["input"], str) and is_secret(name) else f" = {brief(error['input'])}"
        return f"{name}{given}: no such setting"
    hidden = isinstance(error["input"], dict | BaseModel) or "secret" in name
    hidden = hidden or (name.startswith("spark.conf.") and is_secret(name))
    # JSON of a section that can't be read may have a secret anywhere.
    hidden = hidden or (error["type"] in ("model_type", "dict_type") and "{" in str(error["input"]))
    shown = "" if hidden else f" = {brief(error['input'])}"
    message = _WANTED.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    return f"{name}{shown}: {message[0].lower()}{message[1:]}"


def brief(value: object) -> str:
    """Returns a value as in Python, in the middle of a line: a long one shortened, as one of many aliases may be."""
    return _BRIEF.repr(value)


def _place(at: tuple[str | int, ...], path: Path, tree: yaml.Node | None, prefix: str) -> tuple[str, bool]:
    """Finds a setting, or else the innermost section around it.

    Args:
        at: the parts of the setting's name.
        path: the settings file.
        tree: the file's root node.
        prefix: the prefix of environment variables that are settings.

    Returns:
        the place, an environment variable or file and line; and whether it is that of the setting itself.
    """
    environment = {name.upper() for name in os.environ}
    for end in range(len(at), 0, -1):
        variable = (prefix + "__".join(map(str, at[:end]))).upper()
        if variable in environment:
            return variable, True
    within = (prefix + "__".join(map(str, at)) + "__").upper()
    if at == ("routes",) and (parts := sorted(name for name in environment if name.startswith(within))):
        return parts[0], True  # a list that is given by parts
    place = str(path)
    for part in at:
        if isinstance(tree, yaml.MappingNode):
            yaml.constructor.SafeConstructor().flatten_mapping(tree)
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
