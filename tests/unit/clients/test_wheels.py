"""What the two distributions install: names of their own, and the client is light."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hatchling import build

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

# Of packages that are often beside ours, and need not be installed here: proto-plus, which google-cloud's use, ...
OTHERS = {"proto", "google", "googleapiclient", "grpc", "pulsar", "kafka", "celery", "airflow", "dagster"}


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
    assert not service & client
    assert not (service | client) & OTHERS
    installed = packages_distributions()
    owners = {name: set(installed.get(name, ())) - {"delaylake", "delaylake-client"} for name in service | client}
    assert not any(owners.values()), owners


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
