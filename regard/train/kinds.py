"""What a column of a table holds, by its cells: texts, labels, tags of words, ids, numbers of lines, attributions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from regard.data.columns import escaped
from regard.data.matched import parse_number

LABEL = 60  # characters of a label, at the most and in the mean
FEW = 20  # different answers that are labels even in a short file, and even if they are numbers such as 2.5
COUNTED = 3  # lines, from which on numbers that grow may be those of the lines
LONG_ID = 40  # characters of an id, at the most
SAME = 8  # characters that all attributions begin with, at the least
ID = re.compile(r"[\w.:#/@+-]*\d[\w.:#/@+-]*", re.ASCII)
CREDIT = re.compile(r"CC[- ]?(BY|0)|https?://|.*\b(attribution|licen[cs]e)\b", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z][\w .-]{0,39}")  # of a column
SPAN = re.compile("[BIESLU]-.+")  # a tag of words that belong together


def are_labels(answers: Sequence[str]) -> bool:
    """Return whether these are short, and the same ones again and again."""
    distinct = len({answer.strip() for answer in answers})
    brief = sum(map(len, answers)) <= LABEL * len(answers)
    return brief and (distinct <= len(answers) / 10 or (distinct <= FEW and distinct < len(answers) / 2))


def numbering(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the columns that hold nothing but whole numbers, each larger than the one before."""
    if len(rows) < COUNTED:
        return []
    columns = [[cell.strip() for cell in column] for column in zip(*rows, strict=True)]
    return [
        at
        for at, cells in enumerate(columns)
        if all(cell.isascii() and cell.isdigit() for cell in cells)
        and all(int(one) < int(two) for one, two in pairwise(cells))
    ]


def are_tags(rows: Sequence[tuple[str, ...]]) -> bool:
    """Return whether the second cells are the tags of the words in the first: in every row as many, and all in all few
    different ones, or tags of spans such as B-PER."""
    words, tags = ([row[column].split() for row in rows] for column in (0, 1))
    if any(len(one) != len(two) for one, two in zip(words, tags, strict=True)):
        return False
    if 2 * sum(len(some) > 1 for some in words) < len(rows) or len(rows) < COUNTED:
        return False
    known, met = ({word for some in side for word in some} for side in (tags, words))
    few = 2 * len(known) <= len(met) and 5 * len(known) <= sum(map(len, tags))
    return few or ("O" in known and any(map(SPAN.fullmatch, known)))


class Column(NamedTuple):
    """A column by its name and its cells.

    kind: text, labels or numbers, which may be learned; lines (their numbers), ids, same (as in all rows) or credit
          (whose the row is), which are not.
    """

    name: str
    kind: str
    cells: Sequence[str]

    @property
    def length(self) -> float:
        """The characters of a cell, in the mean."""
        return sum(map(len, self.cells)) / max(len(self.cells), 1)

    @property
    def useful(self) -> bool:
        return self.kind in ("text", "labels", "numbers")

    def __str__(self) -> str:
        cell = self.cells[0].strip()
        return f"{escaped(self.name)} ('{escaped(cell, 24)}{' ...' if len(cell) > 24 else ''}')"


def kind_of(cells: Sequence[str]) -> str:
    """Return what stands in a column; see Column."""
    cells = [cell.strip() for cell in cells]
    different = len(set(cells))
    if numbering([(cell,) for cell in cells]):
        return "lines"
    if len(cells) >= COUNTED and different == 1:
        return "same"
    if all(map(CREDIT.match, cells)) or (len(cells) >= FEW and _begin_alike(cells)):
        return "credit"
    if are_labels(cells):
        return "labels"
    if len(cells) >= COUNTED and different == len(cells) and all(map(_is_id, cells)):
        return "ids"
    return "numbers" if all(parse_number(cell) is not None for cell in cells) else "text"


def headed(columns: Sequence[Sequence[str]]) -> bool:
    """Return whether the first cells are names of columns: they look so, and one of them is unlike all below it."""
    names = [cells[0].strip() for cells in columns]
    if len(set(names)) < len(names) or not all(map(NAME.fullmatch, names)) or len(columns[0]) < COUNTED:
        return False
    return any(_unlike(name, cells[1:]) for name, cells in zip(names, columns, strict=True))


def _unlike(name: str, cells: Sequence[str]) -> bool:
    kind = kind_of(cells)
    if kind in ("lines", "ids") or all(parse_number(cell) is not None for cell in cells):
        return not _is_id(name) and parse_number(name) is None
    return kind == "labels" and len(cells) >= FEW and name not in {cell.strip() for cell in cells}


def _is_id(cell: str) -> bool:
    """Return whether this is short, without spaces, with a digit, and no number such as 2.5."""
    value = parse_number(cell)
    named = value is None or (len(cell) > 5 and value % 1 == 0)
    return named and len(cell) <= LONG_ID and ID.fullmatch(cell) is not None


def _begin_alike(cells: Sequence[str]) -> bool:
    """Return whether all begin with the same words, which are half of them or more."""
    pairs = enumerate(zip(min(cells), max(cells), strict=False))
    alike = next((at for at, (one, two) in pairs if one != two), len(min(cells)))
    return alike >= SAME and 2 * alike >= sum(map(len, cells)) / len(cells)
