"""Stream the rows of one data file in any of the usual formats: the wanted texts, or why a row is bad.

    text     one record per line                   tsv   columns between tabs, no quoting
    jsonl    one JSON object per line              csv   columns between commas, quoted where needed
    parquet  see parquet.py                        any of them gzipped, name.gz

A file whose contents do not match its name is refused. No more than a block of a file is held in memory.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from regard.core import UserError
from regard.errors import in_one_line, short

from .columns import HEADER_QUESTION, BadRow, ColumnSelector, Row, has_header, may_be_header, quoted_list

SUFFIXES = {
    ".txt": "text", ".text": "text", ".tsv": "tsv", ".tab": "tsv", ".csv": "csv", ".jsonl": "jsonl",
    ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive", b"\xfd7zXZ": "xz", b"BZh91AY&SY": "bzip2", b"\x28\xb5\x2f\xfd": "zstd",
    b"\xff\xfe": "UTF-16 text", b"\xfe\xff": "UTF-16 text", b"%PDF-": "a PDF", b"\x89PNG": "a picture",
}  # fmt: skip
GZIP, PARQUET, BOM = b"\x1f\x8b", b"PAR1", b"\xef\xbb\xbf"
BLOCK = 1 << 20
MAX_LINE_BYTES = 1 << 28  # a longer line is refused, whatever was compressed there
MAX_PIECE_CHARS = 2000  # longer lines of a running text are split into records of this size
MAX_LINE_FACTOR = 20  # a line with columns may have this many times max_chars characters

NumberedRow = tuple[int, Row]  # the number of the line or row, counted from 1


def format_of(path: Path) -> str:
    """Return the format of a file by its name: tsv, csv, jsonl, parquet, or text."""
    return SUFFIXES.get(without_gz(path).suffix.lower(), "text")


def without_gz(path: Path) -> Path:
    """Return the name without .gz."""
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, decompressed if it is gzipped. Errors of the system become user errors."""
    name = short(path)
    try:
        with open(path, "rb") as file:
            head = file.read(4)
            file.seek(0)
            zipped = path.suffix.lower() == ".gz"
            if not head:
                raise UserError(f"{name} is empty")
            if zipped != (head[:2] == GZIP):
                raise UserError(f"{name} {_unlike(zipped, 'gzip')}")
            if not zipped:
                yield file
                return
            with gzip.GzipFile(fileobj=file) as inner:
                yield inner  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{name} is damaged, its gzip stream does not end well: {in_one_line(error)}") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or in_one_line(error)}") from None


def _unlike(named: bool, form: str) -> str:
    """Return what is wrong with a file that has this format but not its name, or the name but not the format."""
    return (
        f"is not {form}, as its name says: rename it" if named else f"is {form}, which its name does not say: rename it"
    )


def check_contents(path: Path, form: str) -> None:
    """Refuse a file whose first bytes are those of another format."""
    with open_bytes(path) as file:
        head = file.read(16)
    if not head:
        raise UserError(f"{short(path)} is empty")
    if (form == "parquet") != head.startswith(PARQUET):
        raise UserError(f"{short(path)} {_unlike(form == 'parquet', 'Parquet')}")
    for magic, what in OTHER_FORMATS.items():
        if head.startswith(magic):
            raise UserError(f"{short(path)} is {what}, and cannot be read as {form}: convert it to UTF-8 text first")


def read_lines(path: Path, max_chars: int) -> Iterator[str | BadRow]:
    """Yield every line without its end, or why it is bad. Lines end in \\n or \\r\\n only."""
    rest, first, since = b"", True, 0
    with open_bytes(path) as file:
        while block := file.read(BLOCK):
            if first:
                block, first = block.removeprefix(BOM), False
            head, feed, tail = block.rpartition(b"\n")
            since = len(tail) if feed else since + len(block)
            if since > MAX_LINE_BYTES:
                raise UserError(f"{short(path)} holds a line of more than {MAX_LINE_BYTES:,} bytes, which is no text")
            if not feed:
                rest = (rest + block)[: 4 * max_chars + 2]  # enough to tell that it is too long
                continue
            yield from _decoded(rest + head, max_chars)
            rest = tail[: 4 * max_chars + 2]
    if rest:
        yield from _decoded(rest, max_chars)


def _decoded(block: bytes, max_chars: int) -> Iterator[str | BadRow]:
    try:
        texts = block.decode().split("\n")
    except UnicodeDecodeError:
        for line in block.split(b"\n"):
            yield from _decoded_line(line, max_chars)
        return
    for text in texts:
        if text.endswith("\r"):
            text = text[:-1]
        yield text if len(text) <= max_chars else _too_long(max_chars)


def _decoded_line(line: bytes, max_chars: int) -> Iterator[str | BadRow]:
    try:
        text = line.decode().removesuffix("\r")
        yield text if len(text) <= max_chars else _too_long(max_chars)
    except UnicodeDecodeError as error:
        if len(line) > 4 * max_chars:
            yield _too_long(max_chars)
        else:
            yield _not_utf8(error)


def _not_utf8(error: UnicodeDecodeError) -> BadRow:
    return BadRow("not UTF-8", f"byte {error.start + 1} (0x{error.object[error.start]:02x}) is not UTF-8")


def _too_long(max_chars: int) -> BadRow:
    return BadRow("too long", f"more than {max_chars:,} characters")


class Text:
    """Plain text, one record per line; a long line is split before spaces. Records keep their line ends, so that joined
    they are the text again."""

    unit, documents = "line", False

    def __init__(self, path: Path):
        self.path, self.name = path, short(path)
        check_contents(path, "text")

    def rows(self) -> Iterator[NumberedRow]:
        number = 1
        for block in self._blocks():
            *whole, rest = block.split(b"\n")
            for line in whole:
                yield from self._pieces(number, line.removesuffix(b"\r") + b"\n")
                number += 1
            if rest:  # the line continues in the next block
                yield from self._pieces(number, rest)

    def _blocks(self) -> Iterator[bytes]:
        """Yield blocks of whole lines, or of whole characters where a line is longer than a block."""
        rest, first = b"", True
        with open_bytes(self.path) as file:
            while block := file.read(BLOCK):
                rest += block.removeprefix(BOM) if first else block
                first = False
                cut = rest.rfind(b"\n") + 1
                if not cut and len(rest) >= BLOCK:
                    cut = next((len(rest) - n for n in (1, 2, 3, 4) if rest[-n] & 0xC0 != 0x80), len(rest))
                if cut:
                    yield rest[:cut]
                rest = rest[cut:]
        if rest:
            yield rest + b"\n"

    def _pieces(self, number: int, line: bytes) -> Iterator[NumberedRow]:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            yield number, _not_utf8(error)
            return
        while len(text) > MAX_PIECE_CHARS:
            cut = text.rfind(" ", 1, MAX_PIECE_CHARS)
            cut = cut if cut > 0 else MAX_PIECE_CHARS
            yield number, (text[:cut],)
            text = text[cut:]
        yield number, (text,)

    def key(self) -> list[Any]:
        return [file_stamp(self.path)]


class Parallel:
    """Two plain text files: line n of one is the translation of line n of the other."""

    unit, documents = "line", True

    def __init__(self, source: Path, target: Path, max_chars: int):
        self.paths, self.max_chars = (source, target), max_chars
        self.names = (short(source), short(target))
        self.name = f"{self.names[0]} and {self.names[1]}"
        for path in self.paths:
            if format_of(path) != "text":
                raise UserError(f"{short(path)} is not plain text: of two parallel files each has one sentence a line")
            check_contents(path, "text")

    def rows(self) -> Iterator[NumberedRow]:
        for number, pair in enumerate(zip_longest(*(read_lines(path, self.max_chars) for path in self.paths)), 1):
            yield number, self._row(number, pair)

    def _row(self, number: int, pair: tuple[str | BadRow | None, str | BadRow | None]) -> Row:
        for name, side in zip(self.names, pair, strict=True):
            if side is None:
                other = self.names[1 - self.names.index(name)]
                return BadRow("no partner", f"{name} ends after line {number - 1} and {other} goes on", other)
            if isinstance(side, BadRow):
                return side._replace(file=name)
            if not side or side.isspace():
                return BadRow("empty", "this line is empty, and that of the other file is not", name)
        return pair  # type: ignore[return-value]

    def key(self) -> list[Any]:
        return [file_stamp(path) for path in self.paths]


class Table:
    """A TSV, CSV or JSON lines file of which some columns are wanted.

    columns: names or numbers, counted from 0; none: those with usual names, or all where there are no others.
    header:  whether the first line of a TSV or CSV file names the columns; None: it does if it looks like names.

    `header_unsure`: the first line was taken as data because it does not look like names, and the user did not say.
    """

    unit, documents = "line", True

    def __init__(
        self, path: Path, form: str, columns: tuple[str, ...], wanted: int, max_chars: int, header: bool | None = None
    ):
        self.path, self.form, self.max_chars, self.name = path, form, max_chars, short(path)
        check_contents(path, form)
        self.delimiter = self._delimiter() if form == "csv" else "\t"
        first = self._first()
        try:
            self.header = form in ("tsv", "csv") and isinstance(first, list) and self._is_header(first, columns, header)
            self.header_unsure = form in ("tsv", "csv") and header is None and not self.header
            self.pick = ColumnSelector(first, self.header, columns, wanted, max_chars)
        except UserError as error:
            raise error.of(self.name) from None

    def _is_header(self, first: list, columns: tuple[str, ...], said: bool | None) -> bool:
        found = has_header(first, columns) if said is None else said
        if not found and said is None and may_be_header(first):
            raise UserError(f"the first line is {quoted_list(first)}, {HEADER_QUESTION}")
        return found

    def _delimiter(self) -> str:
        head = next(
            (line for line in read_lines(self.path, MAX_LINE_FACTOR * self.max_chars) if isinstance(line, str)), ""
        )
        return next((mark for mark in ("\t", ",", ";") if mark in head), ",")

    def _first(self) -> list | dict:
        """Return the first record that can be read."""
        wrong = f"{self.name} holds no record"
        for number, fields in self._fields():
            if not isinstance(fields, BadRow):
                return fields
            wrong = f"{self.name}, line {number}: {fields.message}" if number == 1 else wrong
        raise UserError(wrong)

    def rows(self) -> Iterator[NumberedRow]:
        header, pick = self.header, self.pick
        for number, fields in self._fields():
            if isinstance(fields, BadRow):
                yield number, fields
            elif header:
                header = False
            else:
                yield number, pick(fields)

    def _fields(self) -> Iterator[tuple[int, list | dict | BadRow]]:
        every = read_lines(self.path, MAX_LINE_FACTOR * self.max_chars)
        if self.form == "csv":
            yield from csv_fields(every, self.delimiter, self.max_chars)
        elif self.form == "tsv":
            for number, line in enumerate(every, 1):
                yield number, line.split("\t") if isinstance(line, str) else line
        else:
            for number, line in enumerate(every, 1):
                if isinstance(line, BadRow):
                    yield number, line
                elif line and not line.isspace():
                    yield number, json_fields(line)

    def key(self) -> list[Any]:
        return [file_stamp(self.path), self.form, self.delimiter, self.header, self.pick.wanted]


def csv_fields(every: Iterator[str | BadRow], delimiter: str, max_chars: int) -> Iterator[tuple[int, list | BadRow]]:
    """Yield the records of a CSV file, each with the number of its first line. A quoted field may hold line ends."""
    csv.field_size_limit(max(csv.field_size_limit(), max_chars + 1))
    number, bad = 0, []

    def feed() -> Iterator[str]:
        nonlocal number
        for number, line in enumerate(every, 1):
            if isinstance(line, BadRow):
                bad.append((number, line))
            else:
                yield line + "\n"

    reader = csv.reader(feed(), delimiter=delimiter, strict=True)
    while True:
        begin = number + 1
        try:
            fields: list | BadRow | None = next(reader)
        except StopIteration:
            fields = None
        except csv.Error as error:
            fields = BadRow("not CSV", f"not CSV: {in_one_line(error)}")
        yield from bad
        bad.clear()
        if fields is None:
            return
        if fields:
            yield begin, fields


def json_fields(line: str) -> list | dict | BadRow:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRow("not JSON", f"not JSON: {in_one_line(error)} (JSON lines have a whole object on every line)")
    if not isinstance(record, list | dict):
        return BadRow("not JSON", f"a JSON object is expected on every line, and here is {type(record).__name__}")
    if "\\u" in line and _has_lone_surrogate(json.dumps(record, ensure_ascii=False)):
        return BadRow("not UTF-8", "half of a surrogate pair, which is no character")
    return record


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def file_stamp(path: Path) -> list[Any]:
    """Return the path, size and modification time of a file, which change when it does."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
