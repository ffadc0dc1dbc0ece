"""Named queries: what is a value stays one, and files of SQL have nothing that nobody runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from warehouse.named_queries import FALSE, TRUE, NamedQueries, Sql, columns, identifier, in_ranges, literal

ROOT = Path(__file__).parents[3]
FOLDERS = ("warehouse", "checkpoint_from_tables", "admin", "jobs", "streaming")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.sql"))

TEXTS = """
-- named --
-- A comment with :nothing in it.
SELECT :columns FROM t WHERE a = :value AND :condition AND b <> ':value'

-- condition --
c IN (:some)

-- other --
:shared
"""


@pytest.fixture
def queries(tmp_path: Path) -> NamedQueries:
    (tmp_path / "module.sql").write_text(TEXTS)
    return NamedQueries(str(tmp_path / "module.py"), shared=7)


def test_names_stand_for_values_and_for_other_sections(queries: NamedQueries) -> None:
    found = queries("named", columns=columns(["a", "B c"]), value="it's :some", some=[1, 2])
    assert found == """SELECT a, "B c" FROM t WHERE a = 'it''s :some' AND c IN (1, 2) AND b <> ':value'"""
    assert queries("named", columns=Sql("*"), value=None, condition=TRUE).endswith(
        "a = NULL AND true AND b <> ':value'"
    )
    numbers: Any = [np.int64(-3), 2**63 - 1]
    assert queries("condition", some=numbers) == "c IN (-3, 9223372036854775807)"
    assert queries("other") == "7"
    assert queries.names == ["named", "condition", "other"]


def test_queries_are_read_from_the_archive_that_executors_have(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "program.zip", "w") as archive:
        archive.writestr("folder/module.sql", TEXTS)
    assert NamedQueries(str(tmp_path / "program.zip/folder/module.py"), shared=7)("other") == "7"


def test_what_has_no_value_is_an_error_and_so_is_an_empty_list(queries: NamedQueries) -> None:
    with pytest.raises(KeyError, match="some"):
        queries("named", columns=Sql("*"), value=1)
    with pytest.raises(ValueError, match="no empty list"):
        queries("condition", some=[])
    with pytest.raises(KeyError, match="unknown"):
        queries("unknown")


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")))
def test_a_text_is_read_as_it_is(text: str) -> None:
    assert pa.table(QueryBuilder().execute(f"SELECT {literal(text)} AS x").read_all())["x"].to_pylist() == [text]
    assert duckdb.execute(f"SELECT {literal(text)}").fetchall() == [(text,)]


def test_a_name_with_quotes_is_one_name() -> None:
    name = 'a" , 1 AS "b'
    assert pa.table(QueryBuilder().execute(f"SELECT 1 AS {identifier(name)}").read_all()).column_names == [name]


def test_no_range_is_no_row() -> None:
    assert in_ranges("a", []) == f"({FALSE})"
    assert in_ranges("a", [(1, 2), (5, 5)]) == "(a BETWEEN 1 AND 2 OR a BETWEEN 5 AND 5)"


def test_values_skip_files(tmp_path: Path) -> None:
    """By the log's statistics, as constants in the text do."""
    for i in range(5):
        write_deltalake(str(tmp_path), pa.table({"a": pa.array(range(100 * i, 100 * i + 100))}), mode="append")
    (tmp_path / "module.sql").write_text("-- some --\nSELECT a FROM t WHERE a >= :least AND :near")
    sql = NamedQueries(str(tmp_path / "module.py"))("some", least=250, near=in_ranges("a", [(310, 320)]))
    builder = QueryBuilder()
    builder.register("t", DeltaTable(str(tmp_path)))
    plan = pa.table(builder.execute(f"EXPLAIN {sql}").read_all()).to_pylist()[-1]["plan"]
    assert len(re.findall(r"\.parquet", plan)) == 1, plan
    assert pa.table(builder.execute(sql).read_all()).num_rows == 11


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_section_is_run_by_the_module_beside_it(path: Path) -> None:
    module = path.with_suffix(".py").read_text()
    sql = path.read_text()
    runs_all = "_SQL.names" in module
    for name in NamedQueries(str(path)).names:
        assert runs_all or f'"{name}"' in module or re.search(rf":{name}\b", sql), name
