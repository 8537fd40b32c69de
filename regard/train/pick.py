"""The task, the recipe and its size for data of which nothing else is said: `regard train --data FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from regard.core import UserError
from regard.core.errors import short
from regard.data import Lines, open_corpus
from regard.data.columns import listed
from regard.data.conll import is_conll
from regard.data.folder import existing, exists, looks_like_table, main_place
from regard.data.forms import form_of
from regard.data.matched import number

from .origin import check_task

ROWS = 10_000  # that are looked at, about
LABEL = 60  # characters of a label, at the most and in the mean
FEW = 20  # different answers that are labels even in a short file, and even if they are numbers such as 2.5
COUNTED = 3  # lines, from which on numbers that grow may be those of the lines

RECIPES = {  # by what the data is for: a recipe, its size, and the task if that is not the recipe's own
    "pairs": ("transformer-preln", "tiny", None),
    "text": ("rwkv4", "tiny", None),
    "classify": ("fasttext", "base", None),
    "match": ("word-averaging", "base", None),
    "tag": ("transformer-encoder", "tiny", "tag"),
}


class Picked(NamedTuple):
    """What `regard train` is asked for when only the data is given.

    columns: as --columns; None: all that there are, or those that were given.
    """

    recipe: str
    size: str
    task: str | None
    why: str
    columns: str | None = None


class Seen(NamedTuple):
    """What the data is for, how that was seen, and the columns that are wanted of it; None: as they were given."""

    kind: str
    why: str
    columns: str | None = None


class Given(NamedTuple):
    """What is said about the data, as open_corpus has it."""

    data: str | None
    source: str | None
    target: str | None
    columns: str | None
    header: str | None
    bad_lines: str


def pick(given: Given, task: str | None) -> Picked:
    """task: given by the user, or None."""
    check_task(task)
    seen = _see(given) if task is None else Seen(task, f"--task {task}")
    recipe, size, task = RECIPES[seen.kind]
    return Picked(recipe, size, task, seen.why, seen.columns)


def _see(given: Given) -> Seen:
    if given.data is None or "," in given.data:
        return Seen("pairs", "two parallel files")
    path = Path(given.data)
    if not exists(path):
        if path.suffix:
            existing(path)  # which says that it is not there
        return Seen("pairs", "a data set of the hub")
    try:
        place = main_place(path, given.source, given.target)
    except UserError as error:
        more = "for pictures, recordings or a graph name a recipe: regard train vit, whisper or gat"
        raise UserError(f"{error.message}; {more}") from None
    if len(place) == 2:
        return Seen("pairs", f"parallel files in {short(path)}")
    (file,) = place
    if is_conll(file):
        return Seen("tag", "words with their tags, a line each")
    if form_of(file) == "text" and not looks_like_table(file):
        return Seen("text", "a running text")
    return _of_table(given)


def _of_table(given: Given) -> Seen:
    try:
        lines = _open(given, "pairs")
    except UserError as error:
        try:
            lines = _open(given, "matches")
        except UserError:
            raise error from None
        return _of_three(given, lines)
    rows = _some(lines)
    if given.columns is None and _numbering(rows):
        (column, *_), names = _numbering(rows), _names(lines)
        raise UserError(
            f"{lines.name}: column {names[column]} numbers the lines, and there is one more: say --columns "
            f"{','.join(names)} to learn from both, or name a recipe for texts alone: regard train rwkv4 --columns "
            f"{names[1 - column]}"
        )
    return _of_two(lines.name, rows, None if given.columns else _names(lines))


def _of_three(given: Given, lines: Lines) -> Seen:
    """Two texts and an answer, unless one of the columns numbers the lines."""
    names, numbering = _names(lines), [] if given.columns else _numbering(_some(lines))
    if not numbering:
        return Seen("match", "two texts and an answer in each line")
    left = [name for at, name in enumerate(names) if at not in numbering]
    if len(left) != 2:
        raise UserError(
            f"{lines.name}: several columns look like numbers of lines: say which are wanted, such as --columns "
            f"{','.join(names[:2])}"
        )
    rows = [tuple(text for at, text in enumerate(row) if at not in numbering) for row in _some(lines)]
    seen = _of_two(lines.name, rows, left)
    why = f"{seen.why}; column {names[numbering[0]]} numbers the lines and is left out"
    return Seen(seen.kind, why, seen.columns or ",".join(left))


def _of_two(name: str, rows: Sequence[tuple[str, ...]], columns: Sequence[str] | None) -> Seen:
    """A text and its label, in either order, or a source and a target.

    name:    of the file, for sentences.
    columns: their names; None: their order was given.
    """
    answers = [row[1].strip() for row in rows]
    distinct, labels = len(set(answers)), _are_labels(answers)
    values = [number(answer) for answer in answers]
    if None not in values and (not labels or (distinct > FEW and any(value % 1 for value in values if value))):
        raise UserError(
            f"{name}: the answers are numbers ({listed(answers[:3])}, ...), which are learned for two texts only: "
            "round them to a few classes and say --task classify, or, to write them digit by digit, name a recipe: "
            "regard train transformer-preln"
        )
    if labels:
        return Seen("classify", f"{distinct} different answers in {len(answers):,} lines")
    if columns and _are_labels([row[0] for row in rows]):
        why = f"column {columns[0]} holds {len({row[0].strip() for row in rows})} labels, column {columns[1]} the texts"
        return Seen("classify", why, f"{columns[1]},{columns[0]}")
    return Seen("pairs", "a source and a target in each line")


def _are_labels(answers: Sequence[str]) -> bool:
    """Return whether these are short, and the same ones again and again."""
    distinct = len({answer.strip() for answer in answers})
    brief = sum(map(len, answers)) <= LABEL * len(answers)
    return brief and (distinct <= len(answers) / 10 or (distinct <= FEW and distinct < len(answers) / 2))


def _numbering(rows: Sequence[tuple[str, ...]]) -> list[int]:
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


def _some(lines: Lines) -> list[tuple[str, ...]]:
    """Return about ROWS records, also of a file that is sorted by its labels."""
    return list(islice(lines, 0, None, -(-(lines.count or 1) // ROWS)))


def _names(lines: Lines) -> list[str]:
    """Return how --columns would name what is taken."""
    return lines.records.pick.taken if lines.records.pick else ["0", "1", "2"]


def _open(given: Given, kind: str) -> Lines:
    said = (given.data, given.source, given.target, 0, 0, given.columns, kind, given.bad_lines)
    return open_corpus(*said, header=given.header).train
