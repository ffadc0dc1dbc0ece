"""What the docs name is there: links, files, and what they name in them."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.settings import Settings
from jobs import cli
from warehouse.tables import Tables
from warehouse.views import Warehouse

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / ".github").rglob("*.md")])
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._")


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(doc: Path) -> None:
    links = re.findall(r"\]\((?!\w+:)([^)\s]*)\)", _without_blocks(doc.read_text()))
    missing = [link for link in links if not _leads_somewhere(doc, link)]
    assert missing == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_files_and_names_in_them_are_there(doc: Path) -> None:
    """`folder/file.py` is a path from the root of the repository, `folder/file.py:Class.method` a name in it."""
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*\.\w+)(?::([\w.]+))?`", doc.read_text())
    missing = [f"{path}:{name}" for path, name in named if not _has_name(ROOT / path, name)]
    assert missing == []


def test_commands_have_the_options_that_docs_give_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = sorted({command for doc in DOCS for command in _commands(doc.read_text())})
    assert len(commands) > 60
    wrong = []
    for command in commands:
        monkeypatch.setattr("sys.argv", [*command, "--help"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        if ended.value.code:
            wrong.append(f"{shlex.join(command)}: {capsys.readouterr().err}")
    assert wrong == []


def test_queries_in_docs_can_be_asked(tmp_path: Path) -> None:
    routes = [{"source": "persistent://public/default/orders", "subscriptions": [{"name": "billing"}]}]
    settings = Settings.model_validate({"warehouse": f"file:{tmp_path}/warehouse", "routes": routes})
    Tables(settings.warehouse).create()
    texts = [doc.read_text() for doc in DOCS]
    queries = [command[2] for text in texts for command in _commands(text) if command[:2] == ("delaylake", "sql")]
    queries += [q for text in texts for block in re.findall(r"```sql\n(.*?)```", text, re.S) for q in block.split(";")]
    queries = [query for query in queries if " " in query]
    assert len(queries) > 5
    for query in queries:
        Warehouse(settings).sql(query)


def test_each_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r": ([\w-]+\.md)$", navigation, re.M)) == pages


def test_the_architecture_has_the_folders_in_the_order_of_their_layers() -> None:
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    in_order = [folder for layer in layers for folder in layer.split(" | ")]
    text = (ROOT / "docs/architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)/` \|", text, re.M) == [*in_order, "proto"]


def _commands(text: str) -> Iterator[tuple[str, ...]]:
    """Yields the calls of `delaylake` in a page, as words; not those that are no whole call: with `...` or choices."""
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.S | re.M)
    blocks = [block for language, block in fenced if language in ("", "sh", "bash", "console")]
    for block in [*blocks, *re.findall(r"`([^`\n]+)`", _without_blocks(text))]:
        for line in block.replace("\\\n", " ").splitlines():
            if re.search(r"\.\.\.|[\[|]", line):
                continue
            found = re.match(r"(?:\$ |exec )?(?:\.venv/bin/)?delaylake (.*)", line.strip())
            if found:
                words = shlex.split(found[1], comments=True)
                ends = [i for i, word in enumerate(words) if word in ("&", "|", "&&", ">")]
                yield "delaylake", *words[: min(ends, default=len(words))]


def _without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


def _leads_somewhere(doc: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    file = doc.parent / path if path else doc
    if not file.exists():
        return False
    titles = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if anchor else []
    return not anchor or anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def _has_name(file: Path, name: str) -> bool:
    if not file.exists():
        return False
    if not name:
        return True
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for part in name.split("."):
        found = next((node for node in body if part in _names(node)), None)
        if found is None:
            return False
        body = getattr(found, "body", [])
    return True


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {node.target.id} if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else set()
