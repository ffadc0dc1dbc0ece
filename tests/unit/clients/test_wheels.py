"""What the two distributions install: names of their own, and the client is light."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import zipfile
from collections import defaultdict
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest
from hatchling import build

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

# Of packages that are often beside ours, and need not be installed here: proto-plus, which google-cloud's use, ...
OTHERS = {"proto", "google", "googleapiclient", "grpc", "pulsar", "kafka", "celery", "airflow", "dagster"}


# Packages that many have beside a Pulsar client, and what they own of it all.
NEIGHBOURS = {"google-cloud-core": "google", "proto-plus": "proto", "googleapis-common-protos": "google"}


def install(project: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Unpacks the wheel of a project; returns the top-level names."""
    monkeypatch.chdir(project)
    wheel = build.build_wheel(str(folder))
    with zipfile.ZipFile(folder / wheel) as files:
        files.extractall(folder / "installed")
        return {name.partition("/")[0] for name in files.namelist() if ".dist-info/" not in name}


def test_no_name_is_anybody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = install(ROOT, tmp_path, monkeypatch)
    client = install(ROOT / "clients/python", tmp_path, monkeypatch)
    assert client == {"delaylake"}
    queries = {str(path.relative_to(ROOT)) for folder in service for path in (ROOT / folder).rglob("*.sql")}
    assert "warehouse/pending.sql" in queries
    assert {name for name in queries if not (tmp_path / "installed" / name).exists()} == set()
    assert not service & client
    assert not (service | client) & OTHERS
    installed = packages_distributions()
    owners = {name: set(installed.get(name, ())) - {"delaylake", "delaylake-client"} for name in service | client}
    assert not any(owners.values()), owners


def test_the_service_needs_the_client_that_is_beside_it() -> None:
    service, client = (
        tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (ROOT, ROOT / "clients/python")
    )
    project = client["project"]
    assert f"{project['name']}=={project['version']}" in service["project"]["dependencies"]
    assert service["tool"]["uv"]["sources"] == {project["name"]: {"path": "clients/python"}}


def test_the_client_is_typed_and_loads_neither_pulsar_nor_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(ROOT / "clients/python", tmp_path, monkeypatch)
    assert (tmp_path / "installed/delaylake/py.typed").exists()
    heavy = {"pulsar", "google.protobuf", "pyarrow", "pandas", "numpy", "pyspark", "pydantic", "conf", "tracker"}
    code = f"import sys, delaylake; print(delaylake.__file__, *({heavy} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(tmp_path / "installed/delaylake/__init__.py")]


class Environment:
    """A new environment with both wheels and NEIGHBOURS, installed by pip in the versions of the lock.

    What the service needs beside is that of this environment, and not downloaded.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))

    def fill(self, service: Path, client: Path) -> None:
        lock = (ROOT / "requirements.lock").read_text()
        constraints = self._folder / "constraints.txt"
        constraints.write_text("\n".join(re.sub(r"\[.*\]", "", name) for name in re.findall(r"^\S+==\S+", lock, re.M)))
        self._install("--constraint", str(constraints), *NEIGHBOURS, str(client))
        self._install("--no-deps", str(service))
        (self.packages / "others.pth").write_text(sysconfig.get_path("purelib"))

    def _install(self, *what: str) -> None:
        command = [str(self._folder / "bin/python"), "-m", "pip", "install", "--quiet", *what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "NewConnectionError" in done.stderr and not os.environ.get("CI"):
            pytest.skip("the packages beside which ours are installed need a registry")
        assert done.returncode == 0, done.stderr

    def run(self, program: str, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self._folder / "bin" / program), *arguments]
        done = subprocess.run(
            command, cwd=self._folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.mark.long
def test_both_are_installed_beside_others_and_each_file_is_one_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = []
    for project in (ROOT, ROOT / "clients/python"):
        monkeypatch.chdir(project)
        wheels.append(tmp_path / build.build_wheel(str(tmp_path)))
    beside = Environment(tmp_path / "venv")
    beside.fill(*wheels)

    of_file, of_name = defaultdict(set), defaultdict(set)
    for one in distributions(path=[str(beside.packages)]):
        for file in one.files or ():
            of_file[file.locate()].add(one.name)
            if ".." not in file.parts:
                of_name[file.parts[0]].add(one.name)
    assert {str(file): names for file, names in of_file.items() if len(names) > 1} == {}
    ours = {name: owners for name, owners in of_name.items() if owners & {"delaylake", "delaylake-client"}}
    assert {name: owners for name, owners in ours.items() if len(owners) > 1} == {}
    assert ours["delaylake"] == {"delaylake-client"}
    assert {"jobs", "conf", "admin", "status", "broker"} < {n for n, owners in ours.items() if owners == {"delaylake"}}
    assert not {"tests", "docs", "examples", "benchmarks", *NEIGHBOURS.values()} & ours.keys()
    assert of_name["proto"] == {"proto-plus"}

    # All together in one process, where the same protobuf of both is registered, and those of others.
    code = """
        import delaylake, proto, google.api.annotations_pb2, google.cloud.client
        import admin, broker, conf, jobs, status, tracker.wire.delaylake_pb2 as of_service
        import delaylake.wire.delaylake_pb2 as of_client
        from importlib.metadata import packages_distributions
        print(*packages_distributions()["proto"], proto.Message.__module__)
        print(*(one.__file__ for one in (delaylake, jobs, conf, admin, status, broker)))
        assert of_client.ControlCommand(request_id="r").SerializeToString() == of_service.ControlCommand(
            request_id="r").SerializeToString()
    """
    plus, files = beside.run("python", "-c", textwrap.dedent(code)).splitlines()
    assert plus == "proto-plus proto.message"
    assert all(Path(file).is_relative_to(beside.packages) for file in files.split())
    assert "delaylake" in beside.run("delaylake", "--help")
    assert beside.run("python", "-m", "jobs", "topics", "--help")
