"""Tell what a column of a table holds by its cells: texts, labels, word tags, ids, line numbers or attributions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from regard.data.columns import escaped
from regard.data.matched import parse_number

MAX_LABEL_LENGTH = 60  # mean number of characters up to which cells may be labels
FEW_LABELS = 20  # up to this many distinct answers are labels even in a short file, and even if numbers such as 2.5
MIN_ROWS = 3  # with fewer rows, a column is not taken for line numbers, tags, ids or a constant
MAX_ID_LENGTH = 40  # characters
MIN_COMMON_PREFIX = 8  # characters with which all attributions begin
ID = re.compile(r"[\w.:#/@+-]*\d[\w.:#/@+-]*", re.ASCII)
CREDIT = re.compile(r"CC[- ]?(BY|0)|https?://|.*\b(attribution|licen[cs]e)\b", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z][\w .-]{0,39}")  # of a column
SPAN = re.compile("[BIESLU]-.+")  # a span tag, such as B-PER


def are_labels(answers: Sequence[str]) -> bool:
    """Return whether the answers are short and repeat."""
    distinct = len({answer.strip() for answer in answers})
    brief = sum(map(len, answers)) <= MAX_LABEL_LENGTH * len(answers)
    return brief and (distinct <= len(answers) / 10 or (distinct <= FEW_LABELS and distinct < len(answers) / 2))


def increasing_columns(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the indices of the columns that hold nothing but strictly increasing integers, such as line numbers."""
    if len(rows) < MIN_ROWS:
        return []
    columns = [[cell.strip() for cell in column] for column in zip(*rows, strict=True)]
    return [
        at
        for at, cells in enumerate(columns)
        if all(cell.isascii() and cell.isdigit() for cell in cells)
        and all(int(one) < int(two) for one, two in pairwise(cells))
    ]


def are_tags(rows: Sequence[tuple[str, ...]]) -> bool:
    """Return whether the second cells are tags of the words in the first cells: equally many in every row, and few
    distinct ones altogether, or span tags such as B-PER."""
    words, tags = ([row[column].split() for row in rows] for column in (0, 1))
    if any(len(one) != len(two) for one, two in zip(words, tags, strict=True)):
        return False
    if 2 * sum(len(some) > 1 for some in words) < len(rows) or len(rows) < MIN_ROWS:
        return False
    tag_set, word_set = ({word for row in side for word in row} for side in (tags, words))
    few = 2 * len(tag_set) <= len(word_set) and 5 * len(tag_set) <= sum(map(len, tags))
    return few or ("O" in tag_set and any(map(SPAN.fullmatch, tag_set)))


class Column(NamedTuple):
    """A column of a table, with its name, what it holds and its cells.

    kind: text, labels or numbers, which can be learned from; lines (line numbers), ids, same (a constant) or credit
          (an attribution), which cannot.
    """

    name: str
    kind: str
    cells: Sequence[str]

    @property
    def length(self) -> float:
        """Return the mean number of characters in a cell."""
        return sum(map(len, self.cells)) / max(len(self.cells), 1)

    @property
    def useful(self) -> bool:
        return self.kind in ("text", "labels", "numbers")

    def __str__(self) -> str:
        cell = self.cells[0].strip()
        return f"{escaped(self.name)} ('{escaped(cell, 24)}{' ...' if len(cell) > 24 else ''}')"


def kind_of(cells: Sequence[str]) -> str:
    """Return the kind of a column, as Column lists them."""
    cells = [cell.strip() for cell in cells]
    different = len(set(cells))
    if increasing_columns([(cell,) for cell in cells]):
        return "lines"
    if len(cells) >= MIN_ROWS and different == 1:
        return "same"
    if all(map(CREDIT.match, cells)) or (len(cells) >= FEW_LABELS and _share_prefix(cells)):
        return "credit"
    if are_labels(cells):
        return "labels"
    if len(cells) >= MIN_ROWS and different == len(cells) and all(map(_is_id, cells)):
        return "ids"
    return "numbers" if all(parse_number(cell) is not None for cell in cells) else "text"


def has_header(columns: Sequence[Sequence[str]]) -> bool:
    """Return whether the first row is a header: its cells look like names, and one of them is unlike all cells
    below."""
    names = [cells[0].strip() for cells in columns]
    if len(set(names)) < len(names) or not all(map(NAME.fullmatch, names)) or len(columns[0]) < MIN_ROWS:
        return False
    return any(_differs_from_cells(name, cells[1:]) for name, cells in zip(names, columns, strict=True))


def _differs_from_cells(name: str, cells: Sequence[str]) -> bool:
    kind = kind_of(cells)
    if kind in ("lines", "ids") or all(parse_number(cell) is not None for cell in cells):
        return not _is_id(name) and parse_number(name) is None
    return kind == "labels" and len(cells) >= FEW_LABELS and name not in {cell.strip() for cell in cells}


def _is_id(cell: str) -> bool:
    """Return whether a cell is short, without spaces, with a digit, and not a number such as 2.5."""
    value = parse_number(cell)
    named = value is None or (len(cell) > 5 and value % 1 == 0)
    return named and len(cell) <= MAX_ID_LENGTH and ID.fullmatch(cell) is not None


def _share_prefix(cells: Sequence[str]) -> bool:
    """Return whether all cells begin with the same characters, and these are at least half of their mean length."""
    pairs = enumerate(zip(min(cells), max(cells), strict=False))
    alike = next((at for at, (one, two) in pairs if one != two), len(min(cells)))
    return alike >= MIN_COMMON_PREFIX and 2 * alike >= sum(map(len, cells)) / len(cells)
