"""Find the files that a user means by a file, two parallel files or a folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from regard.core import UserError
from regard.errors import short

from .columns import escaped
from .forms import SUFFIXES, check_contents, format_of, read_lines, without_gz

SPLIT_NAMES = {"train": ("train", "training"), "dev": ("dev", "valid", "validation", "val"), "test": ("test",)}
SIDES = (("source", "target"), ("src", "tgt"), ("src", "trg"), ("input", "output"))
HEAD = 200  # lines that are read to tell whether a text is a table
SHARD = re.compile(r"-\d+-of-\d+$")

DataFiles = tuple[Path, ...]  # a file, or two parallel ones


@dataclass
class FoundFiles:
    """The files of every split, and notes for the user about what was chosen."""

    parts: dict[str, list[DataFiles]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def parse_files(text: str) -> DataFiles:
    """Return the file of this name, or the two files whose names are separated by a comma."""
    whole = Path(text)
    if exists(whole) or "," not in text:
        return (existing_file(whole),)
    names = [Path(name.strip()) for name in text.split(",")]
    if len(names) != 2:
        raise UserError(f"'{escaped(text)}' names {len(names)} files: one, or two parallel ones, are wanted")
    return tuple(existing_file(name) for name in names)


def existing_file(path: Path) -> Path:
    """Return the path if a regular file is there; otherwise refuse it."""
    if exists(path):
        if path.is_file():
            return path
        what = "a folder, and a file is wanted" if path.is_dir() else "no regular file, and data is read more than once"
        raise UserError(f"{short(path)} is {what}")
    raise UserError(f"there is no file '{escaped(path, 400)}'{similar_name_hint(path)}")


def similar_name_hint(path: Path) -> str:
    """Return the end of the message about a missing file: the existing file with the most similar name."""
    folder = path.parent
    try:
        names = [entry.name for entry in folder.iterdir()]
    except (OSError, ValueError):
        return f", nor a folder '{escaped(folder, 400)}'"
    close = get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean '{folder / close[0]}'?" if close else ""


def looks_like_table(path: Path) -> bool:
    """Return whether a .txt file holds tab-separated columns: most of its first lines have the same number of tabs."""
    return share_of_table_lines(path) > 0.5


def share_of_table_lines(path: Path) -> float:
    """Return the share of the first lines, empty ones aside, that have the most frequent number of tabs (above 0)."""
    check_contents(path, "text")
    head = [
        line.count("\t") for line in islice(read_lines(path, 1 << 20), HEAD) if isinstance(line, str) and line.strip()
    ]
    return max((head.count(tabs) for tabs in set(head) if tabs), default=0) / max(len(head), 1)


def find_splits(folder: Path, kind: str, source: str | None, target: str | None) -> FoundFiles:
    """Return the train, dev and test files of a folder."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"{short(folder)} cannot be read: {error.strerror}") from None
    found = FoundFiles()
    for part in SPLIT_NAMES:
        mine = _best(part, entries)
        if not mine:
            continue
        places = _places(mine, folder, kind, source, target, found.notes)
        if places:
            found.parts[part] = places
    if "train" not in found.parts:
        seen = ", ".join(entry.name for entry in entries[:8]) or "nothing"
        raise UserError(
            f"{short(folder)} holds no train file (train.tsv, train.en and train.de, ...), but {seen}; "
            "to use one file, give the file itself"
        )
    return found


def first_training_file(path: Path, source: str | None = None, target: str | None = None) -> DataFiles:
    """Return the first training file of a file or folder, or the first two parallel ones."""
    return find_splits(path, "pairs", source, target).parts["train"][0] if path.is_dir() else (path,)


def stem(path: Path) -> str:
    """Return the name without the suffixes of its format: train.en.gz -> train.en, train.txt -> train."""
    name = without_gz(path)
    return name.stem if name.suffix.lower() in SUFFIXES else name.name


def _best(part: str, entries: list[Path]) -> list[Path]:
    """Return the files whose name is that of the split; else those that begin with it; else those that end with it."""
    words = "|".join(SPLIT_NAMES[part])
    shapes = (rf"({words})(\.[a-z0-9_-]+)?", rf"({words})[._-].*", rf".*[._-]({words})(\.[a-z0-9_-]+)?")
    groups: dict[str, list[Path]] = {shape: [] for shape in shapes}
    for entry in entries:
        name = SHARD.sub("", stem(entry)).lower()
        fits = next((shape for shape in shapes if re.fullmatch(shape, name)), None)
        if fits:
            groups[fits].append(entry)
    return next((group for group in groups.values() if group), [])


def _places(
    entries: list[Path], folder: Path, kind: str, source: str | None, target: str | None, notes: list[str]
) -> list[DataFiles]:
    tables = [entry for entry in entries if format_of(entry) != "text"]
    texts = [entry for entry in entries if format_of(entry) == "text"]
    if tables and not (source and target):
        return _one(tables, notes)
    if kind == "text" or (len(texts) == 1 and not source):
        return _one(texts, notes)
    sides: dict[str, dict[str, Path]] = {}
    for entry in texts:
        name, dot, side = stem(entry).rpartition(".")
        if dot:
            sides.setdefault(name, {})[side] = entry
    whole = {name: files for name, files in sides.items() if len(files) > 1}
    if not whole:
        names = ", ".join(entry.name for entry in texts)
        raise UserError(
            f"{short(folder)} holds {names}: pairs come as two files such as train.en and train.de, or as a table"
        )
    first = next(iter(whole))
    if len(whole) > 1:
        notes.append(f"{short(folder)}: taking {first}; also there: {', '.join(list(whole)[1:])}")
    return [_pair(whole[first], first, folder, source, target, notes)]


def _one(files: list[Path], notes: list[str]) -> list[DataFiles]:
    """Return one file, or all its shards."""
    shards: dict[str, list[Path]] = {}
    for path in files:
        shards.setdefault(SHARD.sub("", stem(path)), []).append(path)
    name, mine = next(iter(shards.items()), ("", []))
    if len(mine) > 1 and not all(SHARD.search(stem(path)) for path in mine):
        raise UserError(f"which of {', '.join(short(path) for path in mine)} is meant? Give that file itself")
    if len(shards) > 1:
        notes.append(f"{short(files[0].parent)}: taking {name}; also there: {', '.join(list(shards)[1:])}")
    return [(path,) for path in mine]


def _pair(
    files: dict[str, Path], name: str, folder: Path, source: str | None, target: str | None, notes: list[str]
) -> DataFiles:
    if source and target:
        for side in (source, target):
            if side not in files:
                raise UserError(f"{short(folder)} holds no {name}.{side} (there: {_listed(name, files)})")
        return files[source], files[target]
    if len(files) > 2:
        raise UserError(f"{short(folder)} holds {_listed(name, files)}: say which two, as in source='en', target='de'")
    for one, other in SIDES:
        if {one, other} == set(files):
            return files[one], files[other]
    a, b = sorted(files)
    if re.search(rf"(^|[._-]){re.escape(b)}-{re.escape(a)}($|[._-])", folder.name):
        a, b = b, a
    note = f"{short(folder)}: from {a} to {b}; for the other way, give --source {b} --target {a}"
    if note not in notes:
        notes.append(note)
    return files[a], files[b]


def _listed(name: str, sides: Iterable[str]) -> str:
    return ", ".join(f"{name}.{side}" for side in sorted(sides))
