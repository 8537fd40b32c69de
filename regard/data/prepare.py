"""Tokenize texts into a memory-mapped file: written once as a stream, however large the corpus is.

train.arrow   an Arrow file, a list of token ids per column, each ending with the end token     for pairs
train.ids     nothing but token ids, 32 bits each                                               for a running text
*.json        next to it: a key of what it was made of, and how many examples were left out
"""

from __future__ import annotations

import errno
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from regard.core import UserError
from regard.errors import in_one_line, short

from .read import CorpusSplit, Tick, no_progress
from .tokenizer import Tokenizer

CHUNK = 8192  # records that are encoded at a time, and that a record batch of the file holds
VERSION = 1  # of the format of the files
COLUMNS = {1: ("text",), 2: ("source", "target")}


class Coder(Protocol):
    """Encodes records as columns of token ids.

    names: of the columns.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    def __call__(self, rows: list[tuple[str, ...]]) -> list[list[list[int]]]: ...

    def key(self) -> list[Any]:
        """Return what the result depends on, besides the tokenizers."""


class ColumnCoder:
    """Encodes each column with its own tokenizer. The first column, the input, gets the special tokens that its
    tokenizer adds; all others get the end token."""

    def __init__(self, tokenizers: Sequence[Tokenizer]):
        self.tokenizers, self.names = tokenizers, COLUMNS[len(tokenizers)]

    def __call__(self, rows: list[tuple[str, ...]]) -> list[list[list[int]]]:
        first, *others = zip(*rows, strict=True)
        others = [_encode(tokenizer, side) for tokenizer, side in zip(self.tokenizers[1:], others, strict=True)]
        return [self.tokenizers[0].encode_with_special_tokens(first), *others]

    def key(self) -> list[Any]:
        return []


class PreparedDataset:
    """The examples of a prepared file: tuples of token arrays, which are views of the file.

    lengths:  (examples, columns)
    left_out: the number of examples that were too long.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        note = _note(self.path)
        if note is None:
            raise UserError(f"{short(path)} is not prepared data, or was not finished")
        self.left_out: int = note["left_out"]
        try:
            self._file = pa.memory_map(str(path))
            reader = pa.ipc.open_file(self._file)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{short(path)} is damaged: {in_one_line(error)}") from None
        self._parts = [[(_to_numpy(column.values), _to_numpy(column.offsets)) for column in batch] for batch in batches]
        sizes = [np.stack([np.diff(offsets) for _, offsets in part], 1) for part in self._parts]
        self.lengths: np.ndarray = np.concatenate(sizes) if sizes else np.zeros((0, 1), np.int32)
        self._begins = [0, *np.cumsum([len(size) for size in sizes]).tolist()]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"example {index} of {len(self.lengths)}")
        part = bisect_right(self._begins, index) - 1
        at = index - self._begins[part]
        return tuple([values[offsets[at] : offsets[at + 1]] for values, offsets in self._parts[part]])


class Subset:
    """Some examples of prepared data."""

    def __init__(self, data: PreparedDataset, numbers: np.ndarray):
        self.data, self.numbers, self.lengths = data, numbers, data.lengths[numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return self.data[int(self.numbers[index])]


def _to_numpy(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=True)


def prepare(
    lines: CorpusSplit,
    tokenizers: Sequence[Tokenizer],
    path: str | Path,
    max_tokens: int | Sequence[int] | None = None,
    tick: Tick = no_progress,
    code: Coder | None = None,
) -> PreparedDataset:
    """Encode every record and write it to `path`, unless it is there already for the same records and tokenizers.

    max_tokens: the most tokens of a sequence, the end token included, for all columns or for each; longer examples are
                left out.
    tick:       called with the number of examples done.
    code:       encodes the records; None: one tokenizer per column.
    """
    path, code = Path(path), code or ColumnCoder(tokenizers)
    limits = [max_tokens] * len(code.names) if max_tokens is None or isinstance(max_tokens, int) else list(max_tokens)
    key = _cache_key(lines, tokenizers, limits, code.key())
    if not _is_done(path, key):
        schema = pa.schema([(name, pa.list_(pa.int32())) for name in code.names])
        with _write_atomically(path, key) as (part, note):
            note["left_out"] = 0
            with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, schema) as writer:
                done = 0
                for rows in _chunks(lines):
                    columns = code(rows)
                    fits = _fits(columns, limits)
                    note["left_out"] += len(rows) - int(fits.sum())
                    writer.write(pa.record_batch([_lists(column, fits) for column in columns], schema=schema))
                    done += len(rows)
                    tick(done)
    made = PreparedDataset(path)
    if not len(made):
        raise UserError(
            f"none of the {made.left_out} examples of {lines.name} is short enough for max_tokens = {max_tokens}"
        )
    return made


def prepare_text(lines: CorpusSplit, tokenizer: Tokenizer, path: str | Path, tick: Tick = no_progress) -> np.ndarray:
    """Return the token ids of a text as one memory-mapped array, (time,). The end token follows every document, and
    replaces the line ends of a running text where the tokenizer has no token for them."""
    path = Path(path)
    marked = lines.documents or not tokenizer.keeps_newlines()
    key = _cache_key(lines, [tokenizer], [])
    if not _is_done(path, key):
        with _write_atomically(path, key) as (part, _), open(part, "wb") as file:
            done = 0
            for rows in _chunks(lines):
                ids = tokenizer.encode([text for (text,) in rows])
                if marked:
                    for one in ids:
                        one.append(tokenizer.end)
                np.fromiter(chain.from_iterable(ids), np.int32).tofile(file)
                done += len(rows)
                tick(done)
    if not path.stat().st_size:
        raise UserError(f"there is no token in {lines.name}")
    return np.memmap(path, dtype=np.int32, mode="r")


def _chunks(lines: CorpusSplit) -> Iterator[list[tuple[str, ...]]]:
    rows = iter(lines)
    while chunk := list(islice(rows, CHUNK)):
        yield chunk


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    found = tokenizer.encode(texts)
    for ids in found:
        ids.append(tokenizer.end)
    return found


def _fits(columns: list[list[list[int]]], limits: Sequence[int | None]) -> np.ndarray:
    """Return which rows have no column that is too long, (rows,)."""
    fits = np.ones(len(columns[0]), dtype=bool)
    for column, limit in zip(columns, limits, strict=True):
        if limit is not None:
            fits &= np.fromiter(map(len, column), np.int64) <= limit
    return fits


def _lists(column: list[list[int]], fits: np.ndarray) -> pa.ListArray:
    kept = column if fits.all() else [ids for ids, fit in zip(column, fits, strict=True) if fit]
    offsets = np.zeros(len(kept) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, kept), np.int32, len(kept)), out=offsets[1:])
    return pa.ListArray.from_arrays(offsets, np.fromiter(chain.from_iterable(kept), np.int32, int(offsets[-1])))


def _cache_key(
    lines: CorpusSplit, tokenizers: Sequence[Tokenizer], limits: Sequence[int | None], more: Sequence[Any] = ()
) -> str:
    """Return a hash of all that the result depends on."""
    made_of = [VERSION, lines.key(), [tokenizer.hash() for tokenizer in tokenizers], list(limits), *more]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _note_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _note(path: Path) -> dict[str, Any] | None:
    """Return the note next to a file; None: the file is not complete."""
    try:
        note = json.loads(_note_path(path).read_text(encoding="utf-8"))
        return note if path.stat().st_size == note["size"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_done(path: Path, key: str) -> bool:
    note = _note(path)
    return note is not None and note.get("key") == key


@contextmanager
def _write_atomically(path: Path, key: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a temporary path to write to, and the note to fill in. The old note is removed before the file is replaced
    and the new one is written after it, so that a note never describes another file."""
    part, note = path.with_name(path.name + ".part"), {"key": key}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part, note  # type: ignore[misc]
        _note_path(path).unlink(missing_ok=True)
        part.replace(path)
        new_note = _note_path(path).with_name(path.name + ".json.part")
        new_note.write_text(json.dumps(note | {"size": path.stat().st_size}), encoding="utf-8")
        new_note.replace(_note_path(path))
    except OSError as error:
        part.unlink(missing_ok=True)
        full = error.errno == errno.ENOSPC or "No space left" in str(error)
        why = "the disk is full" if full else error.strerror or in_one_line(error)
        raise UserError(f"{short(path)} cannot be written: {why}") from None
    except BaseException:
        part.unlink(missing_ok=True)
        raise
