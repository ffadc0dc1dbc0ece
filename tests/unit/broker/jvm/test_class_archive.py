"""A JVM gets the archive of its own classes, or none: nothing that is wrong with one keeps it from starting."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from broker.jvm.class_archive import archive_options, discard_archive, make_archive
from tests.unit.broker.stand_in import stand_in

NOTES = "-XX:DumpLoadedClassList="
USES = "-XX:SharedArchiveFile="


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DELAYLAKE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def java(tmp_path: Path) -> Path:
    """A stand-in for a JVM, that writes an archive of 3 bytes."""
    library = tmp_path / "jdk" / "lib" / "server" / "libjvm.so"
    library.parent.mkdir(parents=True)
    library.write_text("1")
    program = tmp_path / "jdk" / "bin" / "java"
    program.parent.mkdir()
    behave(program, 'printf abc > "$archive"; cp "$classes" "$0.classes"; echo "$@" > "$0.arguments"')
    return program


def behave(program: Path, body: str) -> None:
    stand_in(program, body, archive="-XX:SharedArchiveFile", classes="-XX:SharedClassListFile")


@pytest.fixture
def jar(tmp_path: Path) -> Path:
    file = tmp_path / "a.jar"
    file.write_text("a")
    return file


def make(java: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, noted: str) -> None:
    """Makes an archive of what a JVM has noted, and waits for it."""
    (notes,) = [Path(option.removeprefix(NOTES)) for option in options if option.startswith(NOTES)]
    notes.write_text(noted)
    command = [str(java), "-Xss4m", "-cp", "a.jar:b/*", *options, "--add-opens=x", "org.Main", "-c", "settings"]
    monkeypatch.setattr("psutil.Process", lambda pid: SimpleNamespace(cmdline=lambda: command))
    make_archive(1, settling_seconds=0)
    deadline = time.monotonic() + 200
    while notes.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not notes.exists()


def test_a_first_start_notes_its_classes_and_later_ones_use_their_archive(
    java: Path, jar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = archive_options("spark", java, [jar], ["-Xss4m"])
    assert [option.startswith(NOTES) for option in first] == [True]
    make(java, first, monkeypatch, "java/lang/Object id: 0\njava/lang/Str")
    used = archive_options("spark", java, [jar], ["-Xss4m"])
    archive = Path(used[0].removeprefix(USES))
    assert archive.read_text() == "abc"
    assert sorted(file.suffix for file in cache.iterdir()) == [".jsa", ".lock"]
    assert (java.parent / "java.classes").read_text() == "java/lang/Object id: 0\n"
    arguments = (java.parent / "java.arguments").read_text().split()
    assert arguments[:5] == ["-Xss4m", "-cp", "a.jar:b/*", "--add-opens=x", "-Xshare:dump"]
    assert "org.Main" not in arguments


@pytest.mark.parametrize(
    "command",
    [[], ["java"], ["java", "-Xss4m", "-cp", "a.jar", "org.Main", f"{NOTES}a.classes"]],
    ids=["ended", "alone", "another JVM"],
)
def test_a_process_that_has_just_ended_or_notes_no_classes_needs_no_archive(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = mock.Mock()
    monkeypatch.setattr("broker.jvm.class_archive.subprocess.run", started)
    monkeypatch.setattr("psutil.Process", lambda pid: SimpleNamespace(cmdline=lambda: command))
    make_archive(1)
    started.assert_not_called()


def test_another_jvm_class_path_or_option_is_another_archive(
    java: Path, jar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(*options: str) -> str:
        return archive_options("spark", java, [jar], options)[0].split(".")[0]

    names = [name(), name("-Xss4m")]
    assert name() == names[0]
    jar.write_text("another")
    names.append(name())
    (java.parent.parent / "lib" / "server" / "libjvm.so").write_text("22")
    names.append(name())
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xmx1g")
    names.append(name())
    assert len(set(names)) == 5


def test_an_archive_without_its_end_is_removed(
    java: Path, jar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(java, archive_options("spark", java, [jar], []), monkeypatch, "")
    (archive,) = cache.glob("*.jsa")
    archive.write_text("ab")
    assert archive_options("spark", java, [jar], [])[0].startswith(NOTES)
    assert not archive.exists()


@pytest.mark.parametrize("body", ["echo no space; exit 1", 'printf abc > "$archive"; kill -9 $$', "exit 0"])
def test_an_archive_that_cannot_be_made_is_tried_once(
    body: str, java: Path, jar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave(java, body)
    make(java, archive_options("spark", java, [jar], []), monkeypatch, "")
    assert sorted(file.suffix for file in cache.iterdir()) == [".lock", ".log"]
    assert "no space" not in body or "no space" in next(cache.glob("*.log")).read_text()
    assert archive_options("spark", java, [jar], []) == []


@pytest.mark.slow
def test_an_archive_with_which_a_jvm_does_not_start_is_not_used_again(
    java: Path, jar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not discard_archive(["-Xss4m"])
    make(java, archive_options("spark", java, [jar], []), monkeypatch, "")
    assert discard_archive(["-Xss4m", *archive_options("spark", java, [jar], [])])
    assert list(cache.glob("*.jsa")) == []
    assert archive_options("spark", java, [jar], []) == []


def test_archives_that_no_start_uses_and_what_was_left_behind_are_removed(
    java: Path, jar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    month = 31 * 86_400
    for name, age in (
        ("spark-aa-3.jsa", month), ("spark-ab-3.jsa", 0), ("broker-aa.11.partial", month), ("spark-aa.11.classes", 0)
    ):  # fmt: skip
        (cache / name).write_text("abc")
        os.utime(cache / name, (time.time() - age,) * 2)
    make(java, archive_options("spark", java, [jar], []), monkeypatch, "")
    left = {file.name for file in cache.iterdir()}
    assert left >= {"spark-ab-3.jsa", "spark-aa.11.classes"}
    assert not left & {"spark-aa-3.jsa", "broker-aa.11.partial"}


def test_without_a_cache_or_a_jvm_that_can_have_one_there_is_none(
    java: Path, jar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DELAYLAKE_CACHE", str(tmp_path / "file"))
    assert archive_options("spark", java, [jar], []) == []
    monkeypatch.setenv("DELAYLAKE_CACHE", str(tmp_path / "with a space"))
    assert archive_options("spark", java, [jar], []) == []
    monkeypatch.setenv("DELAYLAKE_CACHE", str(tmp_path / "cache"))
    shutil.rmtree(java.parent.parent / "lib")
    assert archive_options("spark", java, [jar], []) == []


def test_a_jvm_starts_without_a_word_on_an_archive_that_is_broken(jar: Path, cache: Path, tmp_path: Path) -> None:
    program = shutil.which("java")
    assert program is not None
    options = archive_options("spark", Path(program), [jar], [])
    base = Path(options[0].removeprefix(NOTES)).with_suffix("").with_suffix("")
    archive = base.with_name(f"{base.name}-4096.jsa")
    archive.write_bytes(b"\0" * 4096)
    options = archive_options("spark", Path(program), [jar], [])
    assert options[0] == f"{USES}{archive}"
    done = subprocess.run(
        [program, *options, "-cp", str(jar), "-version"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    plain = subprocess.run([program, "-version"], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr.replace(", sharing", "") == plain.stdout + plain.stderr.replace(", sharing", "")
