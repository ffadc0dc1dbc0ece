"""Large payloads in files: they come back as they were, and stay as long as anybody needs them."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streaming.checkpoint.payload_files import ASIDE_BYTES, PayloadFiles, Payloads, PayloadSweep
from tests.support.tracker.messages import messages
from tracker.messages import concat, with_columns
from tracker.packing import pack, payload_sizes, unpack
from tracker.payload_refs import files_of, refs_of
from tracker.store import StateLostError

LARGE = [os.urandom(ASIDE_BYTES + i) for i in range(3)]


def rows_of(*payloads: bytes | None) -> pa.Table:
    rows = messages([(1, i, 5_000) for i in range(len(payloads))])
    return with_columns(rows, payload=pa.array(payloads, pa.binary()))


def test_large_payloads_come_back_as_they_were_and_others_never_leave(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path / "payloads")
    rows = rows_of(None, LARGE[0], b"", b"x" * (ASIDE_BYTES - 1), LARGE[1])
    aside = files.put_aside(concat([rows, rows_of(LARGE[2])]), 7)
    assert sorted(refs_of(aside)) == [1, 4, 5]
    assert aside["payload"].to_pylist() == [None, None, b"", b"x" * (ASIDE_BYTES - 1), None, None]
    assert payload_sizes(aside).tolist() == [0, ASIDE_BYTES, 0, ASIDE_BYTES - 1, ASIDE_BYTES + 1, ASIDE_BYTES + 2]
    [file] = (tmp_path / "payloads").iterdir()
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent)] == [0o600, 0o700]
    assert (file.name.partition("-")[0], file.stat().st_size) == ("7", 3 * ASIDE_BYTES + 3)
    passed_on = unpack(pack(aside))
    assert len(pack(aside)) < 2 * ASIDE_BYTES
    assert files.bring_back(passed_on).equals(concat([rows, rows_of(LARGE[2])]))
    values = Payloads(passed_on["payload"].to_pylist(), refs_of(passed_on), files)
    assert list(values) == [*rows["payload"].to_pylist(), LARGE[2]]


def test_what_is_in_a_file_already_stays_in_it(tmp_path: Path) -> None:
    files = PayloadFiles(tmp_path)
    first = files.put_aside(rows_of(LARGE[0]), 7)
    again = files.put_aside(concat([first, rows_of(LARGE[1])]), 8)
    assert [ref.file.partition("-")[0] for ref in refs_of(again).values()] == ["7", "8"]
    assert files.bring_back(again)["payload"].to_pylist() == LARGE[:2]


def test_a_batch_that_runs_again_writes_the_same_file_and_one_that_fails_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PayloadFiles(tmp_path)
    first = files.put_aside(rows_of(*LARGE[:2]), 7)
    assert files.put_aside(rows_of(*LARGE[:2]), 7).equals(first)
    assert len(list(tmp_path.iterdir())) == 1
    for others in (rows_of(*LARGE[1::-1]), rows_of(LARGE[0]), rows_of(LARGE[0] + LARGE[1])):
        assert files.bring_back(files.put_aside(others, 7)).equals(others)
    before = sorted(tmp_path.iterdir())
    assert len(before) == 4
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        files.put_aside(rows_of(LARGE[2]), 7)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("left", [0, ASIDE_BYTES])
def test_a_batch_that_runs_again_writes_a_file_anew_of_which_a_loss_of_power_has_left_a_part(
    tmp_path: Path, left: int
) -> None:
    rows, files = messages([(7, 0, 1_000), (7, 1, 1_000)], payload=b"x" * ASIDE_BYTES), PayloadFiles(tmp_path)
    [name] = files_of(files.put_aside(rows, 3))
    (tmp_path / name).write_bytes(b"x" * left)
    again = files.put_aside(rows, 3, is_synced=True)
    assert [*files_of(again)] == [name]
    assert files.bring_back(again)["payload"].to_pylist() == rows["payload"].to_pylist()
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_without_large_payloads_nothing_is_written(tmp_path: Path) -> None:
    rows = rows_of(b"x" * 100, None)
    files = PayloadFiles(tmp_path / "payloads")
    assert files.put_aside(rows, 7) is rows
    assert files.bring_back(rows) is rows
    assert not (tmp_path / "payloads").exists()


@pytest.mark.parametrize("harm", ["gone", "short", "other bytes"])
def test_a_payload_that_is_not_as_it_was_says_which_file_and_what_to_do(tmp_path: Path, harm: str) -> None:
    files, sweep = PayloadFiles(tmp_path), PayloadSweep(tmp_path)
    rows = files.put_aside(rows_of(LARGE[0]), 7)
    [file] = tmp_path.iterdir()
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(LARGE[0][:-1] + (b"" if harm == "short" else bytes([LARGE[0][-1] ^ 1])))
    says = rf"{file} .* is {'gone' if harm == 'gone' else 'damaged'}: run `delaylake rebuild --discard-checkpoint`"
    with pytest.raises(StateLostError, match=says):
        files.bring_back(rows)
    owner: Any = type("Owner", (), {})()
    if harm != "other bytes":
        with pytest.raises(StateLostError, match=says):
            sweep.pin(owner, files_of(rows))


def test_files_stay_while_a_batch_that_runs_again_may_need_them(tmp_path: Path) -> None:
    for name in ("3-old", "4-before", "4-now", "5-input", "5-orphan", "6-next", "notes"):
        (tmp_path / name).touch()
    sweep = PayloadSweep(tmp_path)
    sweep.sweep(4, {"4-before"})
    assert len(list(tmp_path.iterdir())) == 7, "what the state referred to before the first batch of a run is not known"
    sweep.sweep(5, {"4-now"})
    left = {"4-before", "4-now", "5-input", "5-orphan", "6-next", "notes"}
    assert {file.name for file in tmp_path.iterdir()} == left
    sweep.sweep(6, {"5-input"})
    assert {file.name for file in tmp_path.iterdir()} == {"4-now", "5-input", "6-next", "notes"}
    sweep.sweep(7, set())
    sweep.sweep(8, set())
    assert {file.name for file in tmp_path.iterdir()} == {"notes"}


def test_a_file_stays_as_long_as_somebody_sends_from_it(tmp_path: Path) -> None:
    class Job:
        """Somebody who sends."""

    (tmp_path / "3-a").write_bytes(b"abc")
    sweep = PayloadSweep(tmp_path)
    jobs = [Job(), Job()]
    for job in jobs:
        sweep.pin(job, {"3-a": 3})
    del job
    for tick in range(4, 8):
        sweep.sweep(tick, set())
        assert (tmp_path / "3-a").exists() == bool(jobs) or tick == 4
        if tick > 4:
            jobs = jobs[1:]
            gc.collect()
    assert not (tmp_path / "3-a").exists()
