"""Find the columns of a new file that match those that a run was trained with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from regard.core import UserError
from regard.errors import short
from regard.files.reading import Natural

from .columns import BadRow, ColumnSelector
from .conll import Conll, is_conll
from .folder import looks_like_table
from .forms import format_of
from .read import MAX_CHARS, open_table

TEXTS = {
    "pairs": 1,
    "text": 1,
    "matches": 2,
    "tags": 1,
}  # the number of input columns of a record; the others are answers


class Layout(TypedDict, total=False):
    """The table that a run was trained with.

    taken: the columns that were used, by name or number.
    names: the names of all columns, where they have any.
    width: the number of columns.
    """

    taken: list[str]
    names: list[str]
    width: Natural


def layout_of(pick: ColumnSelector | None) -> Layout | None:
    """Return the layout of a table as run.json stores it; None: there is no table."""
    return None if pick is None else {"taken": pick.selected, "names": list(map(str, pick.names)), "width": pick.width}


def layout_in(info: dict[str, Any]) -> Layout | None:
    """Return the layout in run.json, or the one that its --columns give; None: there is neither. info: run.json."""
    columns = info.get("job", {}).get("columns")
    return info.get("table") or ({"taken": [name.strip() for name in columns.split(",")]} if columns else None)


def matching(file: Path, layout: Layout, count: int | None = None) -> tuple[str, ...] | None:
    """Return the columns of a file that has the same names, or the same number of columns without names; else None.

    count: how many of the columns, from the first on; None: all.
    """
    if format_of(file) == "text" and not looks_like_table(file):
        return None
    taken, names = layout.get("taken", [])[:count], layout.get("names", [])
    if _pick(file, taken, named=True):
        return tuple(taken)
    places = [str(names.index(name)) if name in names else name for name in taken]
    pick = _pick(file, places, named=False)
    width = layout.get("width")
    return tuple(places) if pick and (width is None or pick.width == width) else None


def _pick(file: Path, columns: Sequence[str], named: bool) -> ColumnSelector | None:
    """Return the selector of these columns, if the columns of the table have names (`named`), or have none."""
    if not columns or all(column.isdecimal() for column in columns) == named:
        return None
    try:
        pick = open_table(file, tuple(columns)).pick
    except UserError:
        return None
    return pick if bool(pick.names) == named else None


def texts_of(file: Path, kind: str, layout: Layout | None) -> Iterator[str | tuple[str, ...]] | None:
    """Return the input texts of a file that also has answers, such as a test set; None: it has one text per line.

    kind: of the corpus of the run, as in open_corpus.
    """
    count = TEXTS.get(kind)
    if count is None:
        return None
    if kind == "tags" and is_conll(file):
        columns = (layout or {}).get("taken", [])
        return _texts(Conll(file, columns if all(map(str.isdecimal, columns)) else (), MAX_CHARS), 1)
    columns = matching(file, layout, count) if layout else None
    if columns is not None:
        return _texts(open_table(file, columns), count)
    if kind == "text" or format_of(file) != "tsv":
        return None
    width = open_table(file, ("0",), header=False).pick.width
    if width <= count:
        return None
    if layout is None and width == count + 1:
        return _texts(open_table(file, tuple(map(str, range(count)))), count)
    how = f"with the columns {','.join(layout.get('taken', []))}" if layout else "without a table"
    raise UserError(
        f"{short(file)} has {width} columns, and the run was trained {how}: give a file with the same columns, or with "
        f"{'a text' if count == 1 else 'two texts'} a line and nothing else"
    )


def _texts(table: Any, count: int) -> Iterator[str | tuple[str, ...]]:
    for number, row in table.rows():
        if isinstance(row, BadRow):
            raise UserError(f"{table.name}, {table.unit} {number}: {row.message}")
        yield row[0] if count == 1 else row[:count]
