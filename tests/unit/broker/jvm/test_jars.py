"""The JARs are fetched once, whole or not at all, and what fails is said in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.jvm.jars import JarsError, cache_folder, jars
from tests.unit.broker.stand_in import stand_in


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for mvn whose behaviour a test writes, and an empty cache."""
    script = tmp_path / "bin" / "mvn"
    script.parent.mkdir()
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("DELAYLAKE_CACHE", str(tmp_path / "cache"))
    return script


def behave(script: Path, body: str) -> None:
    stand_in(script, f'echo run >> "{script.parent}/runs"\n{body}', out="-DoutputDirectory")


def test_they_are_fetched_once(maven: Path) -> None:
    behave(maven, 'touch "$out/a.jar"')
    folder = jars("spark")
    assert [jar.name for jar in folder.iterdir()] == ["a.jar"]
    assert jars("spark") == folder
    assert (maven.parent / "runs").read_text() == "run\n"


def test_a_failed_fetch_leaves_nothing_and_says_why(maven: Path) -> None:
    behave(maven, 'touch "$out/a.jar"; echo "[INFO] hello"; echo "[ERROR] no such artifact"; echo "[ERROR]"; exit 1')
    with pytest.raises(JarsError, match=r"^Maven could not fetch the spark JARs: no such artifact$"):
        jars("spark")
    assert [path for path in cache_folder().iterdir() if path.is_dir()] == []


def test_a_fetch_that_was_killed_is_done_again(maven: Path) -> None:
    behave(maven, 'touch "$out/a.jar"; kill -9 $$')
    with pytest.raises(JarsError):
        jars("broker")
    behave(maven, 'touch "$out/b.jar"')
    assert [jar.name for jar in jars("broker").iterdir()] == ["b.jar"]


def test_a_missing_maven_is_said(maven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(maven.parent))
    with pytest.raises(JarsError, match=r"Maven \(mvn\) is not on the PATH"):
        jars("broker")


def test_a_cache_that_cannot_be_written_is_said(maven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYLAKE_CACHE", "/dev/null/cache")
    with pytest.raises(JarsError, match="DELAYLAKE_CACHE"):
        jars("broker")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELAYLAKE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/delaylake")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/delaylake")
