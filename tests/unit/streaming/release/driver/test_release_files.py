"""Files of large releases: tasks read them, and they are gone with their job."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from streaming.release.driver.release_files import ReleaseFiles
from tests.support.tracker.messages import messages, release_rows
from tracker.messages import int64
from tracker.packing import pack


def test_a_large_release_is_in_a_file_as_long_as_its_job_is_there(tmp_path: Path) -> None:
    # Bytes that do not get smaller when they are packed.
    noise = os.urandom(300_000)
    rows = release_rows(messages([(1, i, 5 + i) for i in range(4)], payload=noise))
    files = ReleaseFiles("app", tmp_path / "releases")
    release = files.lane_release(
        3, 1, {0: [pack(rows.slice(0, 1)), pack(rows.slice(1))], 1: [pack(rows.slice(0, 1))]}, 3
    )
    large, small = release.assignments
    assert (large.body, small.file) == (b"", "")
    assert int64(large.rows(), "entry_id").tolist() == [0, 1, 2, 3], "its parts are one release"
    assert large.rows().schema.metadata == rows.schema.metadata
    assert release.n_bytes > 1_500_000
    again = ReleaseFiles("app", tmp_path / "releases")
    other = again.lane_release(3, 1, {0: [pack(rows)]}, 4)
    del release
    gc.collect()
    assert other.assignments[0].rows().num_rows == 4, "that of an earlier run takes away nothing of this one"
    file = Path(other.assignments[0].file)
    del other
    gc.collect()
    assert not file.exists()


def test_without_a_folder_rows_go_with_the_task() -> None:
    rows = release_rows(messages([(1, 1, 5)], payload=b"x" * 2_000_000))
    [one] = ReleaseFiles("app", None).lane_release(3, 1, {0: [pack(rows)]}, 3).assignments
    assert (one.file, one.rows().num_rows) == ("", 1)
