"""What the docs name is there: links, files, and what they name in them."""

from __future__ import annotations

import ast
import re
import shlex
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pulsar
import pyarrow as pa
import pytest
import typer
import yaml

from conf.settings import Settings
from docs.make_pictures import SCHEMES, pages
from jobs import cli
from jobs.commands.tables.sql import sql
from streaming.session import _SHIPPED
from tracker.commands.kinds import OPERATIONS, RESUME
from warehouse.delta.tables import Tables
from warehouse.message_schemas import COLUMNS
from warehouse.queries.drained_rows import ROUND_BYTES, ROUND_ROWS
from warehouse.schemas import LATER, SCHEMAS
from warehouse.views import VIEWS, Warehouse

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / ".github").rglob("*.md")])
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._")


# What runs for long, or needs a broker or other systems: tests/acceptance and tests/integration have it.
NOBODY_ANSWERS = "no connection to Pulsar|is the broker up|start a broker|no job has run|nobody can be asked"
STARTED_ELSEWHERE = {"api", "broker", "demo", "dev", "import", "rebuild", "run"}


class _NoBroker:
    """A Pulsar client whose broker does not answer."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., object]:
        def fail(*_: object, **__: object) -> object:
            raise pulsar.ConnectError

        return fail


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(doc: Path) -> None:
    links = re.findall(r"\]\((?!\w+:)([^)\s]*)\)", _without_blocks(doc.read_text()))
    missing = [link for link in links if not _leads_somewhere(doc, link)]
    assert missing == []


@pytest.mark.parametrize("doc", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_pages_link_to_what_is_in_the_site(doc: Path) -> None:
    """Of a link out of `docs` the site makes a dead one, and its builder says nothing: a file is named as code."""
    links = re.findall(r"\]\((?!\w+:)([^)#\s]+)", _without_blocks(doc.read_text()))
    assert [link for link in links if not (doc.parent / link).resolve().is_relative_to(ROOT / "docs")] == []
    assert [link for link in links if not re.search(r"\.(md|webp)$", link)] == []


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


def test_commands_in_docs_do_what_they_can_without_a_broker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is right with them, but that where one needs it no broker, job or person answers."""
    topic = "persistent://public/default/orders"
    tables_of_docs(tmp_path, topic)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELAYLAKE_CONFIG", str(tmp_path / "settings.yaml"))
    monkeypatch.setattr("pulsar.Client", _NoBroker)
    commands = sorted({call for doc in DOCS for block in _blocks(doc.read_text()) for call in _calls(block)})
    elsewhere = ("--watch", "--engine spark")
    commands = [
        c for c in commands if c[1] not in STARTED_ELSEWHERE and not any(words in shlex.join(c) for words in elsewhere)
    ]
    assert len(commands) > 50
    wrong = []
    for command in commands:
        words = [topic if word in ("TOPIC", "$TOPIC", "$orders") else word for word in command]
        monkeypatch.setattr("sys.argv", words)
        try:
            cli.main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
        told = capsys.readouterr().err
        if code and not (code == 1 and re.search(NOBODY_ANSWERS, told)):
            wrong.append(f"{shlex.join(command)}: {code}: {told}")
    assert not wrong, "\n".join(wrong)


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


def test_the_page_of_tables_names_each_table_view_and_column() -> None:
    text = (ROOT / "docs/tables.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", text, re.M))
    tables = {**SCHEMAS, "schemas": COLUMNS, **LATER}
    missing = [
        f"{name}.{column}"
        for name, schema in tables.items()
        for column in schema.names
        if not re.search(rf"\b{column}\b", rows.get(name, ""))
    ]
    assert missing == []
    views = re.findall(r"^\| `(\w+)` \|", text.split("## Views")[1], re.M)
    assert set(views) <= set(VIEWS)
    help_of_sql = sql.__doc__ or ""
    assert [name for name in (*tables, *views) if not re.search(rf"\b{name}\b", help_of_sql)] == []


def test_the_reference_has_each_option_of_each_command() -> None:
    _, *sections = re.split(r"^### ", (ROOT / "docs/reference.md").read_text(), flags=re.M)
    by_command = {re.split(r"`| (?=[A-Z\[])", text[1:])[0]: text for text in sections}

    def missing(command: Any, path: str) -> Iterator[str]:
        for name, child in getattr(command, "commands", {}).items():
            yield from () if child.hidden else missing(child, f"{path} {name}")
        if not hasattr(command, "commands"):
            given = [o for o in command.params if o.param_type_name == "option" and o.name != "help" and not o.hidden]
            options = [o for o in given if o.expose_value]  # the global ones are stored elsewhere
            yield from (f"{path} {o.opts[0]}" for o in options if f"`{o.opts[0]}`" not in by_command[path])

    assert list(missing(typer.main.get_command(cli.app), "delaylake")) == []


def test_what_docs_say_of_constants_is_so() -> None:
    [shipped] = re.findall(
        r"Executors get the packages (.*) from the driver", (ROOT / "docs/deployment.md").read_text()
    )
    assert tuple(re.findall(r"`(\w+)`", shipped)) == _SHIPPED
    assert f"{ROUND_ROWS:,} messages or {ROUND_BYTES >> 20} MiB" in OPERATIONS[RESUME].text


def test_settings_in_docs_can_be_set() -> None:
    blocks = [
        yaml.safe_load(block)
        for doc in DOCS
        for block in re.findall(r"^ *```yaml\n(.*?)^ *```$", doc.read_text(), re.S | re.M)
    ]
    blocks = [
        {"routes": [{"source": "persistent://public/default/orders", **block}]} if "subscriptions" in block else block
        for block in blocks
    ]
    settings = [block for block in blocks if block.keys() & Settings.model_fields.keys()]
    assert len(settings) > 5
    for block in settings:
        Settings.model_validate(block)


def test_each_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r": ([\w-]+\.md)$", navigation, re.M)) == pages


def test_the_architecture_has_the_folders_in_the_order_of_their_layers() -> None:
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    in_order = [folder for layer in layers for folder in layer.split(" | ")]
    text = (ROOT / "docs/architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)/` \|", text, re.M) == [*in_order, "proto"]


def tables_of_docs(folder: Path, topic: str) -> None:
    """Makes tables with a message 7:0 that recurs, as the docs name it, and a file of settings."""
    settings = {
        "warehouse": f"file:{folder}/warehouse",
        "checkpoint": f"file:{folder}/checkpoint",
        "pulsar": {"admin_url": "http://127.0.0.1:1"},
        "routes": [{"source": topic, "subscriptions": [{"name": "billing"}, {"name": "audit"}, {"name": "sms"}]}],
    }
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    (folder / "ids.txt").write_text("7:0:3\n")
    tables = Tables(f"file:{folder}/warehouse")
    tables.create()
    now = time.time_ns() // 1_000_000
    row = {
        "topic": topic, "partition": -1, "ledger_id": 7, "entry_id": 0, "batch_index": -1, "batch_size": 1,
        "operation": "DELAY", "deliver_at": now + 3_600_000, "publish_time": now, "key": "customer-7",
        "properties": [("repeat", "@every 90s")], "occurrence": 1,
    }  # fmt: skip
    schema = SCHEMAS["delayed_index"]
    columns = [pa.array([row.get(field.name)], field.type) for field in schema]
    tables.append("delayed_index", pa.table(columns, schema=schema), {})


def _commands(text: str) -> Iterator[tuple[str, ...]]:
    """Yields the calls of `delaylake` in a page, as words; not those that are no whole call: with `...` or choices."""
    for block in [*_blocks(text), *re.findall(r"`([^`\n]+)`", _without_blocks(text))]:
        yield from _calls(block)


def _blocks(text: str) -> list[str]:
    """Returns what a page has to be typed into a shell."""
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.S | re.M)
    return [block for language, block in fenced if language in ("", "sh", "bash", "console")]


def _calls(text: str) -> Iterator[tuple[str, ...]]:
    for line in text.replace("\\\n", " ").splitlines():
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


def test_each_page_of_the_dashboard_has_its_pictures_and_they_are_shown() -> None:
    names = {f"{page}-{scheme}{width}" for page in pages("", "") for scheme in SCHEMES for width in ("", "-phone")}
    assert {path.stem for path in (ROOT / "docs/images").glob("*.webp")} == names
    shown = re.findall(r"\(images/(\S+)\.webp\)", (ROOT / "docs/dashboard.md").read_text())
    assert set(shown) == names


def test_the_glossary_is_short_and_mostly_in_words_of_the_field() -> None:
    rows = [line.split("|") for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")]
    whose = [row[3].strip() for row in rows if row[1].strip() != "term"]
    assert 40 < len(whose) <= 60
    assert all(whose)
    assert sum(who.startswith("ours") for who in whose) <= 25
