"""Tables as people read them: nothing is cut off, and no line is longer than the terminal."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rich.cells import cell_len

from jobs.text_table import table_text

NAMES = ["topic", "n", "key"]


def test_columns_are_as_wide_as_they_have_to_be_and_numbers_at_the_right() -> None:
    text = table_text(NAMES, [["orders", "7", "k"], ["x", "1,200", ""]], right=["n"], width=80)
    assert text.splitlines() == ["topic       n  key", "orders      7  k", "x       1,200"]


def test_a_table_without_rows_has_its_heading() -> None:
    assert table_text(NAMES, [], width=80) == "topic  n  key"
    names = [f"column_{i}" for i in range(9)]
    lines = table_text(names, [], width=33).splitlines()
    assert max(map(len, lines)) <= 33
    assert "  ".join(lines) == "  ".join(names)


def test_a_long_cell_is_folded_within_its_column_and_breaks_where_words_end() -> None:
    text = table_text(NAMES, [["orders", "7", "a key of several words"]], right=["n"], width=30)
    assert text.splitlines() == ["topic   n  key", "orders  7  a key of several", "           words"]


def test_with_too_many_columns_each_row_is_written_below_the_last() -> None:
    names = [f"column {i}" for i in range(9)]
    text = table_text(names, [[f"{'x' * 30}{i}" for i in range(8)] + [""]] * 2, width=60)
    assert text.splitlines()[:3] == ["-- 1 --", f"column 0  {'x' * 30}0", f"column 1  {'x' * 30}1"]
    assert "-- 2 --" in text
    assert "column 8" not in text, "it is empty"


def test_a_long_cell_below_the_others_is_folded_within_its_column() -> None:
    names = [f"column {i}" for i in range(9)]
    lines = table_text(names, [["x" * 30] * 8 + ["a word " * 20]], width=40).splitlines()
    assert max(map(len, lines)) <= 40
    assert [line[:10].strip() for line in lines[9:]] == ["column 8", "", "", "", ""]
    assert "".join(line[10:] for line in lines[9:]) == "a word " * 20


@pytest.mark.parametrize(("cell", "shown"), [("a\nb", "a\\nb"), ("\x1b[2Jx", "\\x1b[2Jx"), ("[b]:-1:", "[b]:-1:")])
def test_no_value_controls_the_terminal(cell: str, shown: str) -> None:
    assert table_text(["key"], [[cell]], width=80).splitlines() == ["key", shown]


@given(st.lists(st.lists(st.text(max_size=60), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(54, 90))
def test_whatever_the_cells_lines_have_room_and_nothing_is_lost(rows: list[list[str]], width: int) -> None:
    """Three columns of 16 and the gaps between them always have room."""
    lines = table_text(NAMES, rows, width=width).splitlines()
    assert max(map(cell_len, lines)) <= width
    shown = "".join("".join(lines).split())
    for row in rows:
        assert all(c in shown for cell in row for c in cell if c.isprintable() and not c.isspace())
