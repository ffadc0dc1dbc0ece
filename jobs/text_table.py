"""Formats tables as text; cells that do not fit into a line are folded."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence

from conf.errors import printable

_WIDTH = 120  # width of a line without a terminal and without COLUMNS
_LEAST = 16  # the minimum width to which a column is folded
_GAP = "  "
_BREAKS = " ,/"


def table_text(
    names: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = (), width: int | None = None
) -> str:
    """Returns a table as lines that end at a width.

    Columns of text are folded, each cell within its column. Where they get too narrow, each row is written as lines of
    its own, a line for a column; without rows the names are all there is.

    Args:
        names: names of the columns.
        rows: the cells, (rows, columns). Unprintable characters are escaped.
        right: names of columns of numbers, which are aligned at the right, and not folded.
        width: characters in a line; None: those of the terminal, else COLUMNS in the environment, else 120.
    """
    width = width or shutil.get_terminal_size((_WIDTH, 24)).columns
    shown = [[printable(cell) for cell in row] for row in rows]
    natural = [max(map(_cells, column)) for column in zip(names, *shown, strict=True)]
    widths = _folded(natural, [name in right for name in names], width)
    if widths is None:
        return _records(names, shown, width) if shown else "\n".join(map(str.strip, fold(_GAP.join(names), width)))
    lines: list[str] = []
    for row in [names, *shown]:
        parts = [fold(cell, w) for cell, w in zip(row, widths, strict=True)]
        for i in range(max(map(len, parts))):
            line = [part[i] if i < len(part) else "" for part in parts]
            lines.append(_GAP.join(map(_aligned, line, widths, (name in right for name in names))).rstrip())
    return "\n".join(lines)


def _folded(natural: list[int], is_number: list[bool], width: int) -> list[int] | None:
    """Returns widths of the columns with which a row fits into a line; None: it can't fit."""
    widths = list(natural)
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    while excess > 0:
        can_fold = [w for w, fixed in zip(widths, is_number, strict=True) if not fixed and w > _LEAST]
        if not can_fold:
            return None
        widest = max(can_fold)
        i = next(i for i, w in enumerate(widths) if w == widest and not is_number[i])
        # The widest column is cut no further than to the next one's width: then both are cut in turn.
        least = max([w for w in can_fold if w < widest], default=_LEAST)
        cut = min(excess, max(1, widest - least))
        widths[i] -= cut
        excess -= cut
    return widths


def _records(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Returns the table as a numbered heading for each row, followed by lines for its columns that are not empty."""
    length = max(map(_cells, names))
    left = max(width - length - len(_GAP), _LEAST)
    lines = []
    for number, row in enumerate(rows, 1):
        lines.append(f"-- {number} --")
        for name, cell in zip(names, row, strict=True):
            if cell:
                first, *others = fold(cell, left)
                lines.append(f"{_aligned(name, length, False)}{_GAP}{first}")
                lines += [f"{' ' * length}{_GAP}{part}" for part in others]
    return "\n".join(lines)


def fold(text: str, width: int) -> list[str]:
    """Returns a text as lines of a width, broken after one of _BREAKS if there is one in a line's second half."""
    from rich.cells import chop_cells

    lines = []
    while _cells(text) > width:
        line = chop_cells(text[:width], width)[0]
        end = max(map(line.rfind, _BREAKS)) + 1
        end = end if end > len(line) // 2 else len(line)
        lines.append(text[:end])
        text = text[end:]
    return [*lines, text]


def _aligned(text: str, width: int, is_right: bool) -> str:
    space = " " * (width - _cells(text))
    return space + text if is_right else text + space


def _cells(text: str) -> int:
    """Returns the width of a text on a terminal: characters of some scripts take two places."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
