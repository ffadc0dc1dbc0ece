"""The JARs are fetched once, whole or not at all, and what fails is said in one line."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

import pytest

from broker.jvm import jars as jvm_jars
from broker.jvm.jars import CONF, JarsError, cache_folder, jars
from tests.unit.broker.stand_in import stand_in


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for mvn whose behaviour a test writes, an empty cache, and POMs of the empty JARs a and b."""
    monkeypatch.setattr(jvm_jars, "CONF", conf := tmp_path / "conf")
    empty = hashlib.sha256(b"").hexdigest()
    for name, jar in (("spark", "a.jar"), ("broker", "b.jar")):
        (conf / name).mkdir(parents=True)
        (conf / name / "pom.xml").write_text("<project/>")
        (conf / name / "jars.sha256").write_text(f"{empty}  {jar}\n")
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


def test_those_of_any_other_folder_with_a_pom_are_fetched_when_it_is_named(
    maven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "others" / "pulsar-1.2").mkdir(parents=True)
    (folder / "pom.xml").write_text("<project/>")
    behave(maven, 'touch "$out/c.jar"')
    with pytest.raises(JarsError, match=r"the pulsar-1\.2 JARs that Maven fetched are not those of"):
        jars(folder)
    monkeypatch.setattr(sys, "argv", ["jars", "record", str(folder)])
    assert jvm_jars.main() == 0
    assert [jar.name for jar in jars(folder).iterdir()] == ["c.jar"]
    assert jars(folder).name.startswith("pulsar-1.2-")


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


@pytest.mark.parametrize(
    ("makes", "names"),
    [
        ('echo x > "$out/a.jar"', "a.jar"),
        ("true", "a.jar"),
        ('touch "$out/a.jar" "$out/c.jar"', "c.jar"),
        ('touch "$out/b.jar" "$out/c.jar"', "a.jar and 2 more"),
    ],
)
def test_jars_without_the_recorded_hashes_are_not_kept(maven: Path, makes: str, names: str) -> None:
    behave(maven, makes)
    with pytest.raises(JarsError, match=f"not those of .*/conf/spark/jars.sha256: {names}. None was kept") as raised:
        jars("spark")
    assert len(str(raised.value).splitlines()) == 1
    assert [path for path in cache_folder().iterdir() if path.is_dir()] == []


def test_jars_without_recorded_hashes_are_not_kept(maven: Path) -> None:
    (jvm_jars.CONF / "spark" / "jars.sha256").unlink()
    behave(maven, 'touch "$out/a.jar"')
    with pytest.raises(JarsError, match=r"a\.jar"):
        jars("spark")


def test_what_maven_fetches_now_is_recorded_on_demand(maven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behave(maven, 'echo new > "$out/n.jar"')
    monkeypatch.setattr(sys, "argv", ["jars", "record"])
    before = os.umask(0o022)
    try:
        assert jvm_jars.main() == 0
        assert os.umask(before) == 0o077
    finally:
        os.umask(before)
    line = f"{hashlib.sha256(b'new' + os.linesep.encode()).hexdigest()}  n.jar\n"
    for name in ("spark", "broker"):
        assert (jvm_jars.CONF / name / "jars.sha256").read_text() == line
    assert (jars("spark") / "n.jar").stat().st_mode & 0o077 == 0


def test_the_hashes_of_all_jars_are_recorded() -> None:
    for name, least in (("broker", 300), ("spark", 5)):
        lines = (CONF / name / "jars.sha256").read_text().splitlines()
        assert len(lines) >= least
        assert all(re.fullmatch(r"[0-9a-f]{64}  [^ /]+\.jar", line) for line in lines)
        assert len({line.split()[1] for line in lines}) == len(lines)


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
