"""Open data files in the usual formats as three streams of records: train, dev and test.

    corpus = open_corpus("pairs.tsv")                    # one file, split by a hash of the source
    corpus = open_corpus("train.en,train.de", dev="dev.en,dev.de")
    corpus = open_corpus("folder")                       # train.*, dev.* and test.*
    for source, target in corpus.train: ...

Everything is read once at the beginning, so that a bad line is reported, with its number, before any long work.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from regard.core import UserError
from regard.errors import nearest, short

from . import folder, hub, split
from .columns import BadRow, ColumnSelector
from .conll import Checked, Conll, has_sentence_per_line
from .forms import NumberedRow, Parallel, Table, Text, format_of
from .parquet import Parquet

MAX_CHARS = 50_000  # characters of a text
SAMPLE_CHARS = 32_000_000  # characters that are enough to train a tokenizer
# Characters per word, on average; training a tokenizer on texts with longer words costs LONG_RUN_COST times as much.
LONG_RUN = 9
LONG_RUN_COST = 8
KINDS = {"pairs": 2, "text": 1, "matches": 3, "tags": 2}
TICK_EVERY = 1 << 16  # records between two calls of `tick`

Tick = Callable[[int], None]


def no_progress(done: int) -> None:
    """Ignore progress."""


class File(Protocol):
    name: str  # for messages
    unit: str  # what rows are counted in: line or row
    documents: bool  # whether a record is a whole text, not a line of a running text

    def rows(self) -> Iterator[NumberedRow]: ...

    def key(self) -> list[Any]: ...


class Records:
    """All good records of some files, in order, read anew on each iteration.

    skip: leave out and count bad lines, instead of refusing the file.
    """

    def __init__(self, files: list[File], skip: bool):
        self.files, self.skip = files, skip
        self.skipped: Counter[str] = Counter()  # by reason, in the last complete iteration
        self.count = self.characters = self.weight = (
            0  # weight: characters, weighted by the cost of training a tokenizer on them
        )

    @property
    def documents(self) -> bool:
        return self.files[0].documents

    @property
    def pick(self) -> ColumnSelector | None:
        """Return the column selector of the first file; None: it has no columns."""
        return getattr(self.files[0], "pick", None)

    @property
    def header_unsure(self) -> bool:
        """Return whether the first line of the first file was taken as data without the user saying so."""
        return getattr(self.files[0], "header_unsure", False)

    @property
    def name(self) -> str:
        return self.files[0].name + (f" and {len(self.files) - 1} more" if len(self.files) > 1 else "")

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        skipped: Counter[str] = Counter()
        for file in self.files:
            for number, row in file.rows():
                if isinstance(row, BadRow):
                    if not self.skip:
                        raise UserError(
                            f"{row.file or file.name}, {file.unit} {number}: {row.message}; mend it, or leave out all "
                            "that are bad (--bad-lines skip)"
                        )
                    skipped[row.reason] += 1
                else:
                    yield row
        self.skipped = skipped

    def read_and_count(self, tick: Tick) -> Iterator[tuple[str, ...]]:
        """Yield every record; afterwards count, characters and weight are set."""
        count = characters = weight = 0
        for row in self:
            count += 1
            for text in row:
                length = len(text)
                characters += length
                weight += length if length <= LONG_RUN * (text.count(" ") + 1) else LONG_RUN_COST * length
            if count % TICK_EVERY == 0:
                tick(count)
            yield row
        self.count, self.characters, self.weight = count, characters, weight
        if not count:
            why = ", ".join(f"{n} {reason}" for reason, n in self.skipped.items())
            raise UserError(f"{self.name} holds no usable record{f' (skipped: {why})' if why else ''}")

    def check(self, tick: Tick = no_progress) -> None:
        for _ in self.read_and_count(tick):
            pass


class CorpusSplit:
    """One split of a corpus: tuples of texts, streamed from the files on each iteration."""

    def __init__(
        self, records: Records, share: split.HashRange | split.TextRange | None = None, count: int | None = None
    ):
        self.records, self.share = records, share
        self.count = records.count if share is None else count

    @property
    def skipped(self) -> Counter[str]:
        """Return the number of bad lines by reason, in all files."""
        return self.records.skipped

    @property
    def documents(self) -> bool:
        """Return whether each record is a whole text; if not, together they are one running text."""
        return self.records.documents

    @property
    def name(self) -> str:
        return self.records.name

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        if self.share is None:
            yield from self.records
            return
        count = 0
        for row in self.share(self.records):
            count += 1
            yield row
        self.count = count

    def texts(self, *columns: int, max_chars: int = SAMPLE_CHARS, seed: int = 1) -> Iterator[str]:
        """Yield the texts of these columns, or of all; of a large corpus a random sample of about `max_chars`
        characters, fewer in a script without spaces."""
        portion = max_chars / max(self.records.weight, 1)
        chance = random.Random(seed)
        for row in self:
            if portion >= 1 or chance.random() < portion:
                yield from (row[column] for column in columns) if columns else row

    def key(self) -> dict[str, Any]:
        """Return what the records depend on."""
        files = [[type(file).__name__, *file.key()] for file in self.records.files]
        return {"files": files, "skip": self.records.skip, "share": self.share.key() if self.share else None}


class Corpus:
    """The splits of a corpus.

    dev, test: None where there are none.
    notes:     sentences for the user about what was chosen, and what was skipped.
    """

    def __init__(self, train: CorpusSplit, dev: CorpusSplit | None, test: CorpusSplit | None, notes: list[str]):
        self.train, self.dev, self.test, self.notes = train, dev, test, notes

    @property
    def skipped(self) -> Counter[str]:
        every = {id(part.records): part.records for part in (self.train, self.dev, self.test) if part is not None}
        return sum((records.skipped for records in every.values()), Counter())


def open_corpus(
    data: str | Path | None = None,
    source: str | None = None,
    target: str | None = None,
    dev: str | Path | float | None = None,
    test: str | Path | float | None = None,
    columns: str | tuple[str | int, ...] | None = None,
    kind: str = "pairs",
    bad_lines: str = "refuse",
    seed: int = 1,
    max_chars: int = MAX_CHARS,
    tick: Tick = no_progress,
    header: str | None = None,
) -> Corpus:
    """Open a corpus and check all its records.

    data:       a file, two parallel files "a.en,a.de", a folder, or the name of a Hugging Face dataset.
    source, target: instead of data, two parallel files; with a folder, the endings of its parallel files.
    dev, test:  files like data; or how much of data to take for them: a share below 1, a number of records, 0 for none.
    columns:    of tables: names, or numbers counted from 0.
    kind:       pairs; text for language models; matches: two texts and a label; tags: words with one tag each.
    bad_lines:  refuse, or skip them and count.
    max_chars:  the most characters of a text; a longer one is bad. A line of a running text may have any length.
    tick:       called now and then with the number of records read.
    header:     yes or no: the first line of a TSV or CSV file names the columns, or is an example; None: decided by its
                words.
    """
    _check_choice("kind", kind, KINDS)
    if header not in (None, "yes", "no"):
        raise UserError(f"header is yes or no, not '{header}'")
    _check_choice("bad_lines", bad_lines, ("refuse", "skip"))
    if max_chars < 1:
        raise UserError(f"max_chars must be at least 1, not {max_chars}")
    named = None if header is None else header == "yes"
    opener = _Opener(_names(columns), kind, max_chars, bad_lines == "skip", tick, named)
    dev, test = (_size_or_name(given) for given in (dev, test))
    notes: list[str] = []
    parts = _parts(data, source, target, opener, notes)
    sizes: dict[str, float | None] = {}
    for name, given in (("dev", dev), ("test", test)):
        if isinstance(given, str):
            parts[name] = opener.files([folder.parse_files(given)])
        elif given is not None:
            parts.pop(name, None)
            sizes[name] = given
    if len(parts) > 1:
        sizes.setdefault("test", 0.0)  # with a dev set given, nothing of train is taken for test
    sizes = {name: 0.0 if name in parts else sizes.get(name) for name in ("dev", "test")}
    lines = opener.open_and_split(parts.pop("train"), sizes, seed)
    for name, files in parts.items():
        lines[name] = opener.open_unsplit(files)
    corpus = Corpus(lines["train"], lines.get("dev"), lines.get("test"), notes)
    if corpus.skipped:
        why = ", ".join(f"{count} {reason}" for reason, count in corpus.skipped.most_common())
        notes.append(f"skipped {sum(corpus.skipped.values())} bad lines: {why}")
    return corpus


def open_table(
    path: Path, columns: tuple[str, ...] | None = None, header: bool | None = None, max_chars: int = MAX_CHARS
) -> Table | Parquet:
    """Open a table with these columns selected; None: all columns."""
    if columns is None:
        pick = open_table(path, ("0",), header, max_chars).pick
        columns = tuple(map(str, pick.names or range(pick.width)))
    form = format_of(path)
    if form == "parquet":
        return Parquet(path, columns, len(columns), max_chars)
    return Table(path, "tsv" if form == "text" else form, columns, len(columns), max_chars, header)


class _Opener:
    """Opens files with the options that the user gave."""

    def __init__(
        self, columns: tuple[str, ...], kind: str, max_chars: int, skip: bool, tick: Tick, header: bool | None
    ):
        self.columns, self.kind, self.max_chars, self.skip, self.tick = columns, kind, max_chars, skip, tick
        self.header = header
        self.wanted = KINDS[kind]

    def files(self, places: list[folder.DataFiles]) -> list[File]:
        return [self.file(place) for place in places]

    def file(self, place: folder.DataFiles) -> File:
        made = self._file(place)
        if self.header is not None and not (isinstance(made, Table) and made.form in ("tsv", "csv")):
            raise UserError(f"{made.name}: --header is for TSV and CSV files with columns")
        return Checked(made) if isinstance(made, Table | Parquet) and self.kind == "tags" else made

    def _file(self, place: folder.DataFiles) -> File:
        if len(place) == 2:
            if self.kind != "pairs":
                wanted = {"text": "a text is", "matches": "a table with two texts and a label is"}
                wanted = wanted.get(self.kind, "words with their tags beside them are")
                raise UserError(f"two files, {short(place[0])} and {short(place[1])}, are pairs, and {wanted} wanted")
            return Parallel(place[0], place[1], self.max_chars)
        (path,) = place
        form = format_of(path)
        if form == "text" and self.kind == "text":
            return Text(path)
        if self.kind == "tags" and form in ("text", "tsv") and not has_sentence_per_line(path):
            return Conll(path, self.columns, self.max_chars)
        if form == "text":
            if not folder.looks_like_table(path):
                raise UserError(
                    f"{short(path)} has one text a line, and pairs are wanted: give two parallel files, "
                    "or a table with a source and a target column"
                )
            form = "tsv"
        if form == "parquet":
            return Parquet(path, self.columns, self.wanted, self.max_chars)
        return Table(path, form, self.columns, self.wanted, self.max_chars, self.header)

    def open_unsplit(self, files: list[File]) -> CorpusSplit:
        records = Records(files, self.skip)
        records.check(self.tick)
        return CorpusSplit(records)

    def open_and_split(self, files: list[File], sizes: dict[str, float | None], seed: int) -> dict[str, CorpusSplit]:
        """Split files into train, and dev and test where they have a size."""
        records = Records(files, self.skip)
        if all(size == 0 for size in sizes.values()):
            records.check(self.tick)
            return {"train": CorpusSplit(records)}
        if records.documents:
            parts = split.by_hash((row[0] for row in records.read_and_count(self.tick)), sizes, seed)
        else:
            records.check(self.tick)
            parts = split.by_position(records.characters, sizes)
        return {name: CorpusSplit(records, part.share, part.count) for name, part in parts.items()}


def _parts(
    data: str | Path | None, source: str | None, target: str | None, opener: _Opener, notes: list[str]
) -> dict[str, list[File]]:
    if data is None:
        if not source or not target:
            raise UserError("which data? Give --data FILE, or --source and --target for two parallel files")
        pair = (folder.existing_file(Path(source)), folder.existing_file(Path(target)))
        return {"train": opener.files([pair])}
    text, path = str(data), Path(data)
    if folder.exists(path) and path.is_dir():
        if bool(source) != bool(target):
            raise UserError("give both source and target: --source en --target de")
        found = folder.find_splits(path, opener.kind, source, target)
        notes += found.notes
        return {name: opener.files(places) for name, places in found.parts.items()}
    if source or target:
        raise UserError(f"source and target name parallel files, or their endings in a folder, and {text} is a file: "
                        "leave out one or the other; for columns of a table give --columns")  # fmt: skip
    named = hub.NAME.fullmatch(text)
    if named and not folder.exists(path) and (named[1] or not path.suffix):
        parts = hub.load_splits(text, opener.columns, opener.wanted, opener.max_chars, folder.similar_name_hint(path))
        return {name: [part] for name, part in parts.items()}
    return {"train": opener.files([folder.parse_files(text)])}


def _names(columns: str | tuple[str | int, ...] | None) -> tuple[str, ...]:
    if columns is None:
        return ()
    return tuple(str(name).strip() for name in (columns.split(",") if isinstance(columns, str) else columns))


def _size_or_name(given: str | Path | float | None) -> str | float | None:
    if given is None or isinstance(given, int | float):
        return given
    try:
        return str(given) if folder.exists(Path(given)) else float(str(given))
    except ValueError:
        return str(given)


def _check_choice(what: str, word: str, known: Any) -> None:
    if word not in known:
        raise UserError(f"unknown {what} '{word}'{nearest(str(word), known)}")


def overlap(train: CorpusSplit, dev: CorpusSplit) -> int:
    """Return how many records of dev have a source that is also in train; 0 for running text, whose lines may
    repeat."""
    if not dev.documents:
        return 0
    wanted = Counter(hash(row[0]) for row in dev)
    met = {number for row in train if (number := hash(row[0])) in wanted}
    return sum(wanted[number] for number in met)
