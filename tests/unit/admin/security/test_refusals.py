"""Refused calls come to their table in the background, and never get in the way."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from admin.security import refusals as module
from admin.security.refusals import Refusal, Refusals
from warehouse.delta.tables import Tables
from warehouse.schemas import REFUSALS

REFUSAL = Refusal("billing", "192.0.2.1", "POST", "/admin/v2", "persistent://a/b/c", "skip", 403, "no")


async def record(tables: Tables, *refusals: Refusal) -> None:
    async with Refusals(tables) as kept:
        for refusal in refusals:
            kept.add(refusal)


def rows(tables: Tables) -> list[dict[str, Any]]:
    return tables.query("refusals", "SELECT * FROM refusals ORDER BY code").to_pylist()


def test_what_waits_is_written_at_the_end_in_one_commit(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    unknown = Refusal(None, "192.0.2.9", "DELETE", "/x", "persistent://a/b/x", "admin", 401, "a token is needed")
    asyncio.run(record(tables, REFUSAL, unknown))
    first, second = rows(tables)
    assert first.pop("refused_at") > 1_700_000_000_000
    assert first == {**vars(unknown), "path": None, "topic": None, "calls": 1}
    assert (second["role"], second["path"]) == ("billing", "/admin/v2")
    assert tables.version("refusals") == 1
    asyncio.run(record(tables, REFUSAL))
    assert len(rows(tables)) == 3


def test_equal_refusals_and_those_of_callers_without_a_role_are_counted(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    strangers = [
        Refusal(None, f"2001:db8::{i:x}", "POST", f"/admin/v2/{i}", f"persistent://a/b/{i}", "skip", 401, "no token")
        for i in range(500)
    ]
    asyncio.run(record(tables, *strangers, *[REFUSAL] * 7))
    counted, known = rows(tables)
    assert (counted["address"], counted["path"], counted["calls"]) == ("2001:db8::/64", None, 500)
    assert (known["path"], known["calls"]) == ("/admin/v2", 7)


def test_nothing_is_written_where_nothing_was_refused(tmp_path: Path) -> None:
    asyncio.run(record(Tables(str(tmp_path))))
    assert list(tmp_path.iterdir()) == []


def test_what_waits_is_written_after_a_while(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))

    async def run() -> None:
        async with Refusals(tables, flush_seconds=0.01, rest_seconds=0.01) as kept:
            kept.add(REFUSAL)
            async with asyncio.timeout(60):
                while not (tmp_path / "refusals" / "_delta_log" / "00000000000000000001.json").exists():
                    await asyncio.sleep(0.01)

    asyncio.run(run())
    assert len(rows(tables)) == 1


def test_texts_from_outside_are_cut_and_made_storable(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    asyncio.run(record(tables, Refusal("\ud800", "a", "POST", "/" + "x" * 5_000, "t", "skip", 403, "no")))
    (row,) = rows(tables)
    assert (row["role"], len(row["path"])) == ("?", module.MAX_TEXT)


def test_of_a_flood_of_different_calls_few_rows_are_written_and_all_are_counted(tmp_path: Path) -> None:
    tables = Tables(str(tmp_path))
    flood = [replace(REFUSAL, path=f"/admin/v2/{'x' * 5_000}{i}"[::-1], method=f"M{i}") for i in range(2_000)]
    asyncio.run(record(tables, *flood, replace(REFUSAL, code=401, role=None)))
    kept = rows(tables)
    assert len(kept) == module.MAX_WAITING + 2  # and one for each code
    assert sum(row["calls"] for row in kept) == 2_001
    assert {row["method"] for row in kept} == {None}
    assert max(row["calls"] for row in kept) == 2_000 - module.MAX_WAITING


def test_a_flood_that_lasts_is_few_files(tmp_path: Path) -> None:
    """Many calls for about a second, with times a hundredth of the real ones."""
    tables = Tables(str(tmp_path))
    began = time.monotonic()

    async def run() -> None:
        async with Refusals(tables, module.FLUSH_SECONDS / 100, module.REST_SECONDS / 100) as kept:
            for i in range(1_000):
                kept.add(replace(REFUSAL, path=str(i)))
                await asyncio.sleep(0.001)

    asyncio.run(run())
    assert sum(row["calls"] for row in rows(tables)) == 1_000
    assert tables.version("refusals") <= 3 + (time.monotonic() - began) / (module.REST_SECONDS / 100)


def test_a_table_that_can_not_be_written_is_said_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "refusals").write_text("in the way")
    tables = Tables(str(tmp_path))

    async def run() -> None:
        async with Refusals(tables, flush_seconds=0.01, rest_seconds=0.01) as kept:
            kept.add(REFUSAL)
            async with asyncio.timeout(60):
                while not caplog.records:
                    await asyncio.sleep(0.01)
            (tmp_path / "refusals").unlink()
            kept.add(REFUSAL)

    asyncio.run(run())
    assert "1 refused calls wait for the table refusals" in caplog.text
    (row,) = rows(tables)
    assert row["calls"] == 2


def test_the_columns_are_those_of_a_refusal() -> None:
    assert REFUSALS.names == ["refused_at", *vars(REFUSAL), "calls"]
