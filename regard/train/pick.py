"""The task, the recipe and its size for data of which nothing else is said: `regard train --data FILE`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import NamedTuple

from regard.core import UserError
from regard.core.errors import short
from regard.data import Lines, open_corpus
from regard.data.conll import is_conll
from regard.data.folder import existing, exists, looks_like_table, main_place
from regard.data.forms import form_of

ROWS = 10_000  # that are looked at, about
LABEL = 60  # characters of a label, at the most and in the mean


RECIPES = {  # by what the data is for: a recipe, its size, and the task if that is not the recipe's own
    "pairs": ("transformer-preln", "tiny", None),
    "text": ("rwkv4", "tiny", None),
    "classify": ("fasttext", "base", None),
    "match": ("transformer-encoder", "tiny", "match"),
    "tag": ("transformer-encoder", "tiny", "tag"),
}


class Picked(NamedTuple):
    """What `regard train` is asked for when only the data is given."""

    recipe: str
    size: str
    task: str | None
    why: str


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
    kind, why = _kind(given) if task is None else (task, f"--task {task}")
    recipe, size, task = RECIPES[kind]
    return Picked(recipe, size, task, why)


def _kind(given: Given) -> tuple[str, str]:
    """What the data is for, and how that was seen."""
    if given.data is None or "," in given.data:
        return "pairs", "two parallel files"
    path = Path(given.data)
    if not exists(path):
        if path.suffix:
            existing(path)  # which says that it is not there
        return "pairs", "a data set of the hub"
    try:
        place = main_place(path, given.source, given.target)
    except UserError as error:
        more = "for pictures, recordings or a graph name a recipe: regard train vit, whisper or gat"
        raise UserError(f"{error.message}; {more}") from None
    if len(place) == 2:
        return "pairs", f"parallel files in {short(path)}"
    (file,) = place
    if is_conll(file):
        return "tag", "words with their tags, a line each"
    if form_of(file) == "text" and not looks_like_table(file):
        return "text", "a running text"
    return _of_table(given)


def _of_table(given: Given) -> tuple[str, str]:
    try:
        lines = _open(given, "pairs")
    except UserError as error:
        try:
            _open(given, "matches")
        except UserError:
            raise error from None
        return "match", "two texts and an answer in each line"
    every = -(-(lines.count or 1) // ROWS)  # of a file that is sorted by its labels, too
    answers = [row[1].strip() for row in islice(lines, 0, None, every)]
    distinct = len(set(answers))
    brief = sum(map(len, answers)) <= LABEL * len(answers)
    if brief and (distinct <= len(answers) / 10 or (distinct <= 20 and distinct < len(answers) / 2)):
        return "classify", f"{distinct} different answers in {len(answers):,} lines"
    return "pairs", "a source and a target in each line"


def _open(given: Given, kind: str) -> Lines:
    said = (given.data, given.source, given.target, 0, 0, given.columns, kind, given.bad_lines)
    return open_corpus(*said, header=given.header).train
