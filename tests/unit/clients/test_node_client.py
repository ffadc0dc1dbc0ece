"""The client for Node by itself: its types, its own tests, and the package as an application installs it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.clients.node_client import FOLDER, build, need_node, npm, run

pytestmark = pytest.mark.slow

APPLICATION = """
import { Client, NotFound, type MessageId, type Outcome } from "delaylake-client";

const lake = new Client("http://127.0.0.1:8081", { token: () => "t" });
export async function use(id: MessageId): Promise<Outcome[]> {
  // @ts-expect-error a payload is not null
  await lake.schedule("orders", null, { after: "1m" });
  interface Order {
    order: number;
  }
  const order: Order = { order: 7 };
  await lake.schedule("orders", order, { after: "1m" });
  // @ts-expect-error one of at and after, not both
  await lake.reschedule("orders", id, { at: 1, after: 2 });
  try {
    return await lake.reschedule("orders", id, { after: "2h" });
  } catch (error) {
    if (error instanceof NotFound) return [...error.outcomes];
    throw error;
  }
}
console.log(typeof lake.schedule);
"""


@pytest.fixture(autouse=True)
def _node() -> None:
    need_node()


def test_the_types_are_those_of_the_api(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("openapi", FOLDER / "openapi.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "openapi.json").write_text(module.described())
    npm("run", "types", "--", str(tmp_path / "openapi.json"), "--output", str(tmp_path / "openapi.ts"))
    made = (tmp_path / "openapi.ts").read_text()
    assert made == (FOLDER / "src/openapi.ts").read_text(), "`make types` makes them anew"


@pytest.mark.long
def test_its_own_tests_pass() -> None:
    build()
    said = run(["node", "--test", "--test-reporter", "tap", "test/repeats.test.js"])
    assert "# fail 0" in said
    assert "# skipped 0" in said
    [names] = re.findall(r"node --test (.*)", json.loads((FOLDER / "package.json").read_text())["scripts"]["test"])
    assert {FOLDER / name for name in names.split()} == set(FOLDER.glob("test/*.test.js"))


@pytest.mark.long
def test_the_package_has_what_an_application_needs_and_nothing_else(tmp_path: Path) -> None:
    build()
    run([str(FOLDER / "node_modules/.bin/tsc"), "-p", "test"])
    fresh = tmp_path / "project/clients/node"
    shutil.copytree(FOLDER, fresh, ignore=shutil.ignore_patterns("dist", "node_modules", "LICENSE"))
    shutil.copy(FOLDER.parents[1] / "LICENSE", tmp_path / "project")
    (fresh / "node_modules").symlink_to(FOLDER / "node_modules")
    [packed] = json.loads(npm("pack", "--json", "--pack-destination", str(tmp_path), folder=fresh))
    names = {file["path"] for file in packed["files"]}
    assert {"dist/index.js", "dist/index.d.ts", "dist/openapi.d.ts"} <= names
    assert {name for name in names if not name.startswith("dist/")} == {"README.md", "LICENSE", "package.json"}
    (tmp_path / "package.json").write_text('{"type": "module"}')
    npm("install", "--offline", "--no-audit", "--no-fund", str(tmp_path / packed["filename"]), folder=tmp_path)
    assert [path.name for path in (tmp_path / "node_modules").iterdir() if path.name[0] != "."] == ["delaylake-client"]
    (tmp_path / "application.ts").write_text(APPLICATION)
    options = [
        "--strict",
        "--module",
        "nodenext",
        "--target",
        "es2022",
        "--typeRoots",
        str(FOLDER / "node_modules/@types"),
    ]
    run([str(FOLDER / "node_modules/.bin/tsc"), *options, "--types", "node", "application.ts"], tmp_path)
    assert run(["node", "application.js"], tmp_path) == "function\n"


def test_no_registry_is_named() -> None:
    locked = json.loads((FOLDER / "package-lock.json").read_text())
    assert [name for name, one in locked["packages"].items() if "resolved" in one] == []
