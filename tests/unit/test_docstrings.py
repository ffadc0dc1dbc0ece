"""Everything public has a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FOLDERS = ("tracker", "warehouse", "broker", "status", "checkpoint_from_tables", "streaming")

Classes = Mapping[str, list[ast.ClassDef]]  # by name


def is_exempt(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is private, `__dunder__`, a setter, an overload, or says itself that it overrides."""
    decorators = {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}
    return node.name.startswith("_") or bool(decorators & {"setter", "deleter", "overload", "override"})


def bases(classes: Classes, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    for base in node.bases:
        for found in classes.get(ast.unparse(base).split("[")[0].split(".")[-1], []):
            if found is not node:
                yield found
                yield from bases(classes, found)


def undocumented(texts: Mapping[str, str]) -> list[str]:
    """Each public module, class, function and method without a docstring, as `file:line: name`.

    A method that overrides a documented one of a base class needs none.

    Args:
        texts: Python by the name of its file.
    """
    trees = {path: ast.parse(text) for path, text in texts.items()}
    classes: dict[str, list[ast.ClassDef]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    def documented(node: ast.ClassDef) -> set[str]:
        return {part.name for part in node.body if isinstance(part, ast.FunctionDef) and ast.get_docstring(part)}

    def of(path: str, node: ast.Module | ast.ClassDef, prefix: str, inherited: set[str]) -> Iterator[str]:
        for part in node.body:
            if isinstance(part, ast.ClassDef):
                if part.name.startswith("_"):
                    continue
                own = {name for base in bases(classes, part) for name in documented(base)}
                yield from of(path, part, f"{prefix}{part.name}.", own)
            elif (
                not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                or is_exempt(part)
                or part.name in inherited
            ):
                continue
            if not ast.get_docstring(part):
                yield f"{path}:{part.lineno}: {prefix}{part.name}"

    missing = [f"{path}:1: the module" for path, tree in trees.items() if not ast.get_docstring(tree)]
    return missing + [found for path, tree in trees.items() for found in of(path, tree, "", set())]


def test_everything_public_has_a_docstring() -> None:
    files = [path for folder in _FOLDERS for path in sorted((_ROOT / folder).rglob("*.py"))]
    own = {str(path.relative_to(_ROOT)): path.read_text() for path in files if not path.stem.endswith("_pb2")}
    missing = undocumented(own)
    assert not missing, "no docstring:\n" + "\n".join(missing)


def test_what_has_none_is_named() -> None:
    text = '''
class Store:
    """Documented."""
    def get(self):
        """Documented."""
    def put(self): ...
    @property
    def size(self): ...
    @size.setter
    def size(self, n): ...
    def __len__(self): ...
    def _own(self): ...

class Other(Store):
    def get(self): ...

def free():
    def inner(): ...

class _Private:
    def get(self): ...
'''
    assert undocumented({"a.py": text}) == [
        "a.py:1: the module",
        "a.py:6: Store.put",
        "a.py:8: Store.size",
        "a.py:14: Other",
        "a.py:17: free",
    ]
