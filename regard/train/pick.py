"""The task, the recipe and its size for data of which nothing else is said: `regard train --data FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from regard.core import UserError
from regard.data import CorpusSplit, open_corpus
from regard.data.columns import TRIPLES, quoted_list, usual_columns
from regard.data.conll import is_conll
from regard.data.folder import existing_file, exists, first_training_file, share_of_table_lines
from regard.data.forms import format_of
from regard.data.matched import parse_number
from regard.data.read import Records, open_table
from regard.errors import short
from regard.files import recipe as recipes

from .kinds import FEW, Column, are_labels, are_tags, headed, kind_of, numbering
from .origin import check_task

ROWS = 10_000  # that are looked at, about
SURE = 0.9  # of the first lines of a text that have equally many tabs: then it is a table

LEFT_OUT = {  # why a column is
    "lines": "numbers the lines",
    "ids": "holds ids",
    "same": "is the same in all lines",
    "credit": "tells whose the lines are",
}
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
    note:    a sentence about what may not be meant; empty: none.
    """

    recipe: str
    size: str
    task: str | None
    why: str
    columns: str | None = None
    note: str = ""


class Seen(NamedTuple):
    """What the data is for, how that was seen, and the columns that are wanted of it; None: as they were given."""

    kind: str
    why: str
    columns: str | None = None
    note: str = ""


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
    return Picked(recipe, size, task, seen.why, seen.columns, seen.note)


def seen_for(given: Given, origin: Path | None, task: str | None) -> Seen | None:
    """Return what is seen in data for a run that begins from another one, where it is of use there: the columns stand
    in an unusual order, or among others. None: they are taken as they are."""
    if task is None and origin is not None and (origin / "recipe.toml").is_file():
        task = recipes.load(origin / "recipe.toml").get("objective", {}).get("part")
    try:
        seen = _see(given)
    except UserError:
        return None
    return seen if seen.columns and seen.kind == task else None


def _see(given: Given) -> Seen:
    if given.data is None or "," in given.data:
        return Seen("pairs", "two parallel files")
    path = Path(given.data)
    if not exists(path):
        if path.suffix:
            existing_file(path)  # which says that it is not there
        return Seen("pairs", "a data set of the hub")
    try:
        place = first_training_file(path, given.source, given.target)
    except UserError as error:
        more = "for pictures, recordings or a graph name a recipe: regard train vit, whisper or gat"
        raise UserError(f"{error.message}; {more}") from None
    if len(place) == 2:
        return Seen("pairs", f"parallel files in {short(path)}")
    (file,) = place
    if is_conll(file):
        return Seen("tag", "words with their tags, a line each")
    if format_of(file) != "text":
        return _of_table(given, file)
    share = share_of_table_lines(file)
    if share <= 0.5:
        return Seen("text", "a running text")
    plain = "if it is a running text, name a recipe for it: regard train rwkv4"
    if share < SURE:
        raise UserError(
            f"{short(file)}: {share:.0%} of its first lines have equally many tabs, so it may be a table with bad "
            f"lines: if it is, call it .tsv; {plain}"
        )
    try:
        return _of_table(given, file)
    except UserError as error:
        raise UserError(f"{error.message}; {plain}") from None


def _of_table(given: Given, file: Path) -> Seen:
    try:
        lines = _open(given, "pairs")
    except UserError as error:
        try:
            columns = None if given.columns else _columns(given, file)
            if columns is None:
                _open(given, "matches")
                return Seen("match", "two texts and an answer in each line")
        except UserError:
            raise error from None
        if len(columns) < 3:  # they are known, and a line is bad
            raise
        return _of_many(short(file), columns)
    rows = _some(lines)
    if given.columns is None and numbering(rows):
        (column, *_), names = numbering(rows), _names(lines)
        raise UserError(
            f"{lines.name}: column {names[column]} numbers the lines, and there is one more: say --columns "
            f"{','.join(names)} to learn from both, or name a recipe for texts alone: regard train rwkv4 --columns "
            f"{names[1 - column]}"
        )
    return _of_two(lines.name, rows, _names(lines), fixed=given.columns is not None)


def _columns(given: Given, file: Path) -> list[Column] | None:
    """Return all columns of a table where nobody can know which are meant, else none of them; None: some are called as
    two texts and an answer are."""
    header = None if given.header is None else given.header == "yes"
    found = open_table(file, None, header)
    if usual_columns(found.pick.names, 2):
        return []
    if any({str(name).strip().lower() for name in found.pick.names}.issuperset(some) for some in TRIPLES):
        return None
    records = Records([found], skip=True)
    records.check()
    rows = list(zip(*_some(CorpusSplit(records)), strict=True))
    names = found.pick.selected
    if not found.pick.names and header is None and headed(rows):
        names, rows = [cells[0].strip() for cells in rows], [cells[1:] for cells in rows]
    return [Column(name, kind_of(cells), cells) for name, cells in zip(names, rows, strict=True)]


def _of_many(name: str, columns: Sequence[Column]) -> Seen:
    """Two columns, or two texts and an answer, where the others cannot be learned from; else the user is asked."""
    useful = [column for column in columns if column.useful]
    chosen = ",".join(column.name for column in useful)
    others = [f"column {one.name} {LEFT_OUT[one.kind]} and is left out" for one in columns if not one.useful]
    if len(useful) == 2 and any(column.kind == "text" for column in useful):
        one, two = useful
        seen = _of_two(name, list(zip(one.cells, two.cells, strict=True)), [one.name, two.name])
        return Seen(seen.kind, "; ".join([seen.why, *others]), seen.columns or chosen)
    kinds = [column.kind for column in useful]
    if kinds[:2] == ["text", "text"] and kinds[2:] in (["labels"], ["numbers"]) and not _tagged(useful):
        why = "; ".join(["two texts and an answer in each line", *others])
        return Seen("match", why, chosen)
    raise UserError(
        f"{name}: there are {len(columns)} columns, and which are meant is not clear: {', '.join(map(str, columns))}; "
        f"say {', or '.join(_ways(columns))}"
    )


def _ways(columns: Sequence[Column]) -> list[str]:
    """Return what may be meant, as --columns would say it."""
    tagged = _tagged([column for column in columns if column.useful])
    ways = [f"--columns {words.name},{tags.name} for words with their tags" for words, tags in tagged]
    texts = [one for one in columns if one.kind == "text" and not any(one is tags for _, tags in tagged)]
    labels = sorted((one for one in columns if one.kind == "labels"), key=lambda one: len(set(one.cells)))
    longest = max(texts, key=lambda one: one.length, default=None)
    if longest and labels:
        ways.append(f"--columns {longest.name},{labels[0].name} for a text and its label")
    if len(texts) > 1:
        ways.append(f"--columns {texts[0].name},{texts[1].name} for a source and a target")
    return ways or [f"which, such as --columns {','.join(column.name for column in columns[:2])}"]


def _tagged(columns: Sequence[Column]) -> list[tuple[Column, Column]]:
    """Return words with their tags."""
    pairs = ((one, two) for one in columns for two in columns if one is not two)
    return [pair for pair in pairs if are_tags(list(zip(pair[0].cells, pair[1].cells, strict=True)))]


def _of_two(name: str, rows: Sequence[tuple[str, ...]], columns: Sequence[str], fixed: bool = False) -> Seen:
    """Words and their tags, a text and its label, each in either order, or a source and a target.

    name:    of the file, for sentences.
    columns: their names.
    fixed:   their order was given.
    """
    if are_tags(rows):
        return Seen("tag", "as many tags as words in each line")
    if not fixed and are_tags([row[::-1] for row in rows]):
        why = f"as many tags as words in each line; column {columns[0]} holds the tags, column {columns[1]} the words"
        return Seen("tag", why, f"{columns[1]},{columns[0]}")
    answers = [row[1].strip() for row in rows]
    distinct, labels = len(set(answers)), are_labels(answers)
    values = [parse_number(answer) for answer in answers]
    if None not in values and (not labels or (distinct > FEW and any(value % 1 for value in values if value))):
        raise UserError(
            f"{name}: the answers are numbers ({quoted_list(answers[:3])}, ...), which are learned for two texts only: "
            "round them to a few classes and say --task classify, or, to write them digit by digit, name a recipe: "
            "regard train transformer-preln"
        )
    if labels:
        return Seen("classify", f"{distinct} different answers in {len(answers):,} lines")
    note, turned = "", f"{columns[1]},{columns[0]}"
    if are_labels([row[0] for row in rows]):
        different = sorted({row[0].strip() for row in rows})
        if not fixed:
            why = f"column {columns[0]} holds {len(different)} labels, column {columns[1]} the texts"
            return Seen("classify", why, turned)
        note = (
            f"note: column {columns[0]} looks like labels ({quoted_list(different[:3])}), and the texts of column "
            f"{columns[1]} are written from it; to label these texts, say --columns {turned}"
        )
    return Seen("pairs", "a source and a target in each line", note=note)


def _some(lines: CorpusSplit) -> list[tuple[str, ...]]:
    """Return about ROWS records, also of a file that is sorted by its labels."""
    return list(islice(lines, 0, None, -(-(lines.count or 1) // ROWS)))


def _names(lines: CorpusSplit) -> list[str]:
    """Return how --columns would name what is taken."""
    return lines.records.pick.selected if lines.records.pick else ["0", "1", "2"]


def _open(given: Given, kind: str) -> CorpusSplit:
    said = (given.data, given.source, given.target, 0, 0, given.columns, kind, given.bad_lines)
    return open_corpus(*said, header=given.header).train
