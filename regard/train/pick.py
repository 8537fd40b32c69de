"""Pick the task, the recipe and its size where the user gives nothing but data: `regard train --data FILE`."""

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

from .kinds import FEW_LABELS, Column, are_labels, are_tags, has_header, increasing_columns, kind_of
from .origin import check_task

SAMPLE_SIZE = 10_000  # approximate number of records by which a table is judged
MIN_TABLE_SHARE = 0.9  # share of the first lines with equally many tabs from which on a text file is a table

WHY_LEFT_OUT = {  # kind of a column -> why it is left out
    "lines": "numbers the lines",
    "ids": "holds ids",
    "same": "is the same in all lines",
    "credit": "holds attributions",
}
RECIPES = {  # kind of data -> recipe, size, and the task if that is not the recipe's own
    "pairs": ("transformer-preln", "tiny", None),
    "text": ("rwkv4", "tiny", None),
    "classify": ("fasttext", "base", None),
    "match": ("word-averaging", "base", None),
    "tag": ("transformer-encoder", "tiny", "tag"),
}


class Pick(NamedTuple):
    """The arguments of `regard train` that were picked for the data.

    columns: as --columns; None: all, or those that the user gave.
    note:    a sentence about what the user may not have meant; empty: none.
    """

    recipe: str
    size: str
    task: str | None
    why: str
    columns: str | None = None
    note: str = ""


class Detected(NamedTuple):
    """The kind of the data (a key of RECIPES), why it was detected, and the columns to use; None: as given."""

    kind: str
    why: str
    columns: str | None = None
    note: str = ""


class DataArguments(NamedTuple):
    """The user's arguments about the data, as open_corpus takes them."""

    data: str | None
    source: str | None
    target: str | None
    columns: str | None
    header: str | None
    bad_lines: str


def pick(given: DataArguments, task: str | None) -> Pick:
    """Pick recipe, size and task for some data. task: given by the user, or None."""
    check_task(task)
    seen = _detect(given) if task is None else Detected(task, f"--task {task}")
    recipe, size, task = RECIPES[seen.kind]
    return Pick(recipe, size, task, seen.why, seen.columns, seen.note)


def detect_columns(given: DataArguments, origin: Path | None, task: str | None) -> Detected | None:
    """Return what was detected in data for fine-tuning, where the columns are in an unusual order or among others.
    None: the columns are taken as they are."""
    if task is None and origin is not None and (origin / "recipe.toml").is_file():
        task = recipes.load(origin / "recipe.toml").get("objective", {}).get("part")
    try:
        seen = _detect(given)
    except UserError:
        return None
    return seen if seen.columns and seen.kind == task else None


def _detect(given: DataArguments) -> Detected:
    if given.data is None or "," in given.data:
        return Detected("pairs", "two parallel files")
    path = Path(given.data)
    if not exists(path):
        if path.suffix:
            existing_file(path)  # raises
        return Detected("pairs", "a data set of the hub")
    try:
        place = first_training_file(path, given.source, given.target)
    except UserError as error:
        more = "for pictures, recordings or a graph name a recipe: regard train vit, whisper or gat"
        raise UserError(f"{error.message}; {more}") from None
    if len(place) == 2:
        return Detected("pairs", f"parallel files in {short(path)}")
    (file,) = place
    if is_conll(file):
        return Detected("tag", "words with their tags, a line each")
    if format_of(file) != "text":
        return _detect_table(given, file)
    share = share_of_table_lines(file)
    if share <= 0.5:
        return Detected("text", "a running text")
    plain = "if it is a running text, name a recipe for it: regard train rwkv4"
    if share < MIN_TABLE_SHARE:
        raise UserError(
            f"{short(file)}: {share:.0%} of its first lines have equally many tabs, so it may be a table with bad "
            f"lines: if it is, call it .tsv; {plain}"
        )
    try:
        return _detect_table(given, file)
    except UserError as error:
        raise UserError(f"{error.message}; {plain}") from None


def _detect_table(given: DataArguments, file: Path) -> Detected:
    try:
        lines = _open(given, "pairs")
    except UserError as error:
        try:
            columns = None if given.columns else _columns(given, file)
            if columns is None:
                _open(given, "matches")
                return Detected("match", "two texts and an answer in each line")
        except UserError:
            raise error from None
        if len(columns) < 3:  # the columns are clear, and a line is bad
            raise
        return _detect_among(short(file), columns)
    rows = _sample(lines)
    if given.columns is None and increasing_columns(rows):
        (column, *_), names = increasing_columns(rows), _names(lines)
        raise UserError(
            f"{lines.name}: column {names[column]} numbers the lines, and there is one more: say --columns "
            f"{','.join(names)} to learn from both, or name a recipe for texts alone: regard train rwkv4 --columns "
            f"{names[1 - column]}"
        )
    return _detect_pair(lines.name, rows, _names(lines), fixed=given.columns is not None)


def _columns(given: DataArguments, file: Path) -> list[Column] | None:
    """Return all columns of a table where it is not clear which to use; an empty list where two have the usual names;
    None where three have the usual names of two texts and an answer."""
    header = None if given.header is None else given.header == "yes"
    found = open_table(file, None, header)
    if usual_columns(found.pick.names, 2):
        return []
    if any({str(name).strip().lower() for name in found.pick.names}.issuperset(some) for some in TRIPLES):
        return None
    records = Records([found], skip=True)
    records.check()
    rows = list(zip(*_sample(CorpusSplit(records)), strict=True))
    names = found.pick.selected
    if not found.pick.names and header is None and has_header(rows):
        names, rows = [cells[0].strip() for cells in rows], [cells[1:] for cells in rows]
    return [Column(name, kind_of(cells), cells) for name, cells in zip(names, rows, strict=True)]


def _detect_among(name: str, columns: Sequence[Column]) -> Detected:
    """Detect two columns, or two texts and an answer, where no other column can be learned from; else refuse and
    suggest --columns."""
    useful = [column for column in columns if column.useful]
    chosen = ",".join(column.name for column in useful)
    others = [f"column {one.name} {WHY_LEFT_OUT[one.kind]} and is left out" for one in columns if not one.useful]
    if len(useful) == 2 and any(column.kind == "text" for column in useful):
        one, two = useful
        seen = _detect_pair(name, list(zip(one.cells, two.cells, strict=True)), [one.name, two.name])
        return Detected(seen.kind, "; ".join([seen.why, *others]), seen.columns or chosen)
    kinds = [column.kind for column in useful]
    if kinds[:2] == ["text", "text"] and kinds[2:] in (["labels"], ["numbers"]) and not _tagged_pairs(useful):
        why = "; ".join(["two texts and an answer in each line", *others])
        return Detected("match", why, chosen)
    raise UserError(
        f"{name}: there are {len(columns)} columns, and which are meant is not clear: {', '.join(map(str, columns))}; "
        f"say {', or '.join(_suggestions(columns))}"
    )


def _suggestions(columns: Sequence[Column]) -> list[str]:
    """Return the --columns that the user may mean."""
    tagged = _tagged_pairs([column for column in columns if column.useful])
    ways = [f"--columns {words.name},{tags.name} for words with their tags" for words, tags in tagged]
    texts = [one for one in columns if one.kind == "text" and not any(one is tags for _, tags in tagged)]
    labels = sorted((one for one in columns if one.kind == "labels"), key=lambda one: len(set(one.cells)))
    longest = max(texts, key=lambda one: one.length, default=None)
    if longest and labels:
        ways.append(f"--columns {longest.name},{labels[0].name} for a text and its label")
    if len(texts) > 1:
        ways.append(f"--columns {texts[0].name},{texts[1].name} for a source and a target")
    return ways or [f"which, such as --columns {','.join(column.name for column in columns[:2])}"]


def _tagged_pairs(columns: Sequence[Column]) -> list[tuple[Column, Column]]:
    """Return the pairs of columns that are words and their tags."""
    pairs = ((one, two) for one in columns for two in columns if one is not two)
    return [pair for pair in pairs if are_tags(list(zip(pair[0].cells, pair[1].cells, strict=True)))]


def _detect_pair(name: str, rows: Sequence[tuple[str, ...]], columns: Sequence[str], fixed: bool = False) -> Detected:
    """Detect words and tags, or a text and its label, in either order; else a source and a target.

    name:    of the file, for messages.
    columns: names of the two columns.
    fixed:   the user gave the order.
    """
    if are_tags(rows):
        return Detected("tag", "as many tags as words in each line")
    if not fixed and are_tags([row[::-1] for row in rows]):
        why = f"as many tags as words in each line; column {columns[0]} holds the tags, column {columns[1]} the words"
        return Detected("tag", why, f"{columns[1]},{columns[0]}")
    answers = [row[1].strip() for row in rows]
    distinct, labels = len(set(answers)), are_labels(answers)
    values = [parse_number(answer) for answer in answers]
    if None not in values and (not labels or (distinct > FEW_LABELS and any(value % 1 for value in values if value))):
        raise UserError(
            f"{name}: the answers are numbers ({quoted_list(answers[:3])}, ...), which are learned for two texts only: "
            "round them to a few classes and say --task classify, or, to write them digit by digit, name a recipe: "
            "regard train transformer-preln"
        )
    if labels:
        return Detected("classify", f"{distinct} different answers in {len(answers):,} lines")
    note, turned = "", f"{columns[1]},{columns[0]}"
    if are_labels([row[0] for row in rows]):
        different = sorted({row[0].strip() for row in rows})
        if not fixed:
            why = f"column {columns[0]} holds {len(different)} labels, column {columns[1]} the texts"
            return Detected("classify", why, turned)
        note = (
            f"note: column {columns[0]} looks like labels ({quoted_list(different[:3])}), and the texts of column "
            f"{columns[1]} are written from it; to label these texts, say --columns {turned}"
        )
    return Detected("pairs", "a source and a target in each line", note=note)


def _sample(lines: CorpusSplit) -> list[tuple[str, ...]]:
    """Return about SAMPLE_SIZE records, evenly spaced, since a file may be sorted by its labels."""
    return list(islice(lines, 0, None, -(-(lines.count or 1) // SAMPLE_SIZE)))


def _names(lines: CorpusSplit) -> list[str]:
    """Return the names of the columns in use, as --columns takes them."""
    return lines.records.pick.selected if lines.records.pick else ["0", "1", "2"]


def _open(given: DataArguments, kind: str) -> CorpusSplit:
    said = (given.data, given.source, given.target, 0, 0, given.columns, kind, given.bad_lines)
    return open_corpus(*said, header=given.header).train
