"""A job's temporary files are gone when it ends, and when it was killed, with the next start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jobs.temporary_folder import temporary_folder

HOLDER = """
import subprocess, sys, tempfile
from jobs.temporary_folder import temporary_folder

with temporary_folder():
    # A process that it starts has its files there, too.
    subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkstemp()"], check=True)
    tempfile.mkdtemp()
    print("there", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_where_files_go_while_it_is_there(root: Path) -> None:
    with temporary_folder() as folder:
        assert (folder.parent, folder.stat().st_mode & 0o777) == (root, 0o700)
        assert Path(tempfile.mkdtemp()).parent == folder
        assert os.environ["TMPDIR"] == str(folder)
        assert [*root.iterdir()] == [folder]
    assert [*root.iterdir()] == []
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(root)


@pytest.mark.slow
def test_what_a_killed_process_has_left_goes_and_not_what_is_in_use(root: Path) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for holder in holders:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "there\n"
    assert [len([*folder.iterdir()]) for folder in root.iterdir()] == [3, 3]  # with the lock
    holders[0].kill()
    holders[0].communicate()
    assert len([*root.iterdir()]) == 2
    with temporary_folder():
        assert len([*root.iterdir()]) == 2
    assert len([*root.iterdir()]) == 1
    holders[1].communicate("\n")
    assert [*root.iterdir()] == []


def test_what_only_has_such_a_name_stays(root: Path) -> None:
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "file").touch()
    (root / "delaylake-run-link").symlink_to(root / "elsewhere")
    (root / "delaylake-run-file").touch()
    (root / "delaylake-run-unlocked" / "spark").mkdir(parents=True)
    with temporary_folder():
        pass
    assert (root / "delaylake-run-unlocked" / "spark").is_dir(), "somebody else has taken its lock away"
    (root / "delaylake-run-unlocked" / "spark").rmdir()
    (root / "delaylake-run-unlocked").rmdir()
    assert sorted(path.name for path in root.rglob("*")) == [
        "delaylake-run-file",
        "delaylake-run-link",
        "elsewhere",
        "file",
    ]
