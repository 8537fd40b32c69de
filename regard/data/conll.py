"""Read sentences whose words have one tag each, and find the first token of every word.

    CoNLL         one word and its tag per line, columns between tabs or spaces, an empty line after each sentence
    JSON lines    {"words": ["EU", "rejects"], "tags": ["B-ORG", "O"]}, or Parquet with such lists

A record is (words, tags), both joined by spaces. The tag of a word is predicted at the first of its tokens, as in
Devlin et al. 2019, arXiv:1810.04805.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from regard.core import UserError
from regard.errors import short

from .batches import IGNORE, Batch, BucketedBatches, SequenceDataset, pad_rows
from .columns import BadRow, Row, escaped
from .forms import NumberedRow, check_contents, file_stamp, format_of, read_lines, without_gz
from .tokenizer import Tokenizer

DOCUMENT = "-DOCSTART-"
PARTS_OF_WORDS = re.compile(r"\d+[-.]\d+")  # "3-4" and "8.1" in CoNLL-U are not words of their own
TAG_SEPARATOR = "/"  # between a word and its tag in an answer


class Rows(Protocol):
    name: str
    unit: str

    def rows(self) -> Iterator[NumberedRow]: ...

    def key(self) -> list[Any]: ...


class Conll:
    """A CoNLL file.

    columns: the numbers of the columns of words and of tags, counted from 0; none: the first and the last, or in
             CoNLL-U the word and its part of speech.
    """

    unit, documents = "line", True

    def __init__(self, path: Path, columns: Sequence[str], max_chars: int):
        self.path, self.max_chars, self.name = path, max_chars, short(path)
        check_contents(path, "text")
        if columns and (len(columns) != 2 or not all(re.fullmatch(r"\d{1,3}", column) for column in columns)):
            raise UserError(f"{self.name}: of a word and its tag the columns are two numbers, such as 0,3, and not "
                            f"'{','.join(columns)}'")  # fmt: skip
        universal = path.name.removesuffix(".gz").endswith(".conllu")
        self.columns = tuple(map(int, columns)) if columns else (1, 3) if universal else (0, -1)

    def rows(self) -> Iterator[NumberedRow]:
        begin, words, bad = 0, [], None
        for number, line in enumerate(read_lines(self.path, self.max_chars), 1):
            if isinstance(line, str) and (not line.strip() or line.startswith(DOCUMENT)):
                if words or bad:
                    yield begin, bad or _record(words)
                words, bad = [], None
                continue
            if not words and isinstance(line, str) and line.startswith("#") and "\t" not in line:
                continue  # a comment before a sentence
            found = line if isinstance(line, BadRow) else self._fields(line)
            begin = begin if words or bad else number
            if isinstance(found, BadRow):
                begin, bad = (begin, bad) if bad else (number, found)
            elif found is not None:
                words.append(found)
        if words or bad:
            yield begin, bad or _record(words)

    def _fields(self, line: str) -> tuple[str, str] | BadRow | None:
        fields = line.split("\t") if "\t" in line else line.split()
        if PARTS_OF_WORDS.fullmatch(fields[0]) and len(fields) == 10:
            return None
        if len(fields) <= max(1, *self.columns):
            return BadRow("too few columns", f"a word and its tag are wanted, and here is '{escaped(line)}'")
        return tuple(fields[column].strip().replace(" ", "_") for column in self.columns)  # type: ignore[return-value]

    def key(self) -> list[Any]:
        return [file_stamp(self.path), *self.columns]


def is_conll(path: Path) -> bool:
    """Return whether a file has one word per line, its tag in another column, and empty lines between sentences."""
    if without_gz(path).suffix.lower() in (".conll", ".conllu", ".conllx", ".iob", ".bio"):
        return True
    if format_of(path) not in ("text", "tsv"):
        return False
    head = [line for line in islice(read_lines(path, 1 << 20), 1, 400) if isinstance(line, str)]
    widths = {line.count("\t") for line in head if line.strip() and not line.startswith("#")}
    return len(widths) == 1 and widths.pop() > 0 and any(not line.strip() for line in head[:-1])


def has_sentence_per_line(path: Path) -> bool:
    """Return whether the rows of a table are sentences with all their tags, not single words: then no line is empty,
    and there are spaces inside its columns."""
    head = [line for line, _ in zip(read_lines(path, 1 << 20), range(200), strict=False) if isinstance(line, str)]
    spaced = (sum(" " in field.strip() for field in line.split("\t")) > 1 for line in head)
    return all(line.strip() for line in head) and any(spaced)


class Checked:
    """A table with a list of words and a list of tags per row; rows where their lengths differ are bad."""

    documents = True

    def __init__(self, inner: Rows):
        self.inner, self.name, self.unit = inner, inner.name, inner.unit
        self.pick = getattr(inner, "pick", None)  # what takes the columns out of it

    def rows(self) -> Iterator[NumberedRow]:
        for number, row in self.inner.rows():
            if isinstance(row, BadRow):
                yield number, row
                continue
            words, tags = (side.split(" ") for side in row)
            if len(words) == len(tags):
                yield number, _record(list(zip(words, tags, strict=True)))
            else:
                yield number, BadRow("unequal", f"{len(words)} words and {len(tags)} tags, and each word has one")

    def key(self) -> list[Any]:
        return self.inner.key()


def _record(words: list[tuple[str, str]]) -> Row:
    for word, tag in words:
        if not word or not tag:
            return BadRow("empty", f"the word '{escaped(word)}' has the tag '{escaped(tag)}': neither may be empty")
        if TAG_SEPARATOR in tag:
            return BadRow(
                "slash", f"the tag '{escaped(tag)}' holds a '{TAG_SEPARATOR}', which stands between a word and its tag"
            )
    return " ".join(word for word, _ in words), " ".join(tag for _, tag in words)


def parse_tags(text: str) -> list[str]:
    """Return the tags of a text of tags alone, or of words with tags: "EU/B-ORG rejects/O"."""
    return [word.rpartition(TAG_SEPARATOR)[2] for word in text.split(" ")] if text else []


def first_tokens_of_words(tokenizer: Tokenizer, sentences: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Return for each sentence its token ids, special tokens included, and the index of the first token of each word;
    -1: the word has no token."""
    valid_texts = [text.encode("utf-8", "replace").decode() for text in sentences]
    found = []
    for text, one in zip(valid_texts, tokenizer.inner.encode_batch(valid_texts, add_special_tokens=True), strict=True):
        ids = one.ids if tokenizer.adds_special_tokens else [*one.ids, tokenizer.end]
        firsts = [-1] * (text.count(" ") + 1 if text else 0)
        for at, ((begin, end), mark) in enumerate(zip(one.offsets, one.special_tokens_mask, strict=True)):
            piece = text[begin:end]
            if mark or not piece.strip():
                continue
            word = text.count(" ", 0, begin + len(piece) - len(piece.lstrip()))
            firsts[word] = at if firsts[word] < 0 else firsts[word]
        found.append((ids, firsts))
    return found


class TagCoder:
    """Encodes records as token ids, and for each token the id of its tag, or IGNORE.

    unknown: the id of a tag that was not learned; None: such a tag is refused.
    """

    names = ("source", "target")

    def __init__(self, source: Tokenizer, target: Tokenizer, unknown: int | None = None):
        self.source, self.target, self.unknown = source, target, unknown

    def __call__(self, rows: Sequence[Row]) -> list[list[list[int]]]:
        tokens, asked = [], []
        for (ids, firsts), row in zip(first_tokens_of_words(self.source, [row[0] for row in rows]), rows, strict=True):
            targets = [IGNORE] * len(ids)
            for first, tag in zip(firsts, self.target.label_ids(row[1].split(" "), self.unknown), strict=True):
                if first >= 0:
                    targets[first] = tag
            tokens.append(ids)
            asked.append(targets)
        return [tokens, asked]

    def key(self) -> list[Any]:
        return ["tags"]


class TagBatches:
    """Batches of tagged sentences: `targets` is (batch, time), IGNORE where no word begins."""

    def __init__(
        self, data: SequenceDataset, budget: int, seed: int, pad: int = 0, shuffle: bool = True, rows: int = 0
    ):
        self.inner = BucketedBatches(data, budget, seed, 0, pad, shuffle, rows)

    def epoch(self, number: int) -> list[np.ndarray]:
        return self.inner.epoch(number)

    def make(self, numbers: np.ndarray) -> Batch:
        rows = [self.inner.data[int(number)] for number in numbers]
        tokens, valid = pad_rows([row[0] for row in rows], self.inner.pad)
        targets, _ = pad_rows([row[1] for row in rows], IGNORE)
        count = int(torch.count_nonzero(targets != IGNORE))
        return Batch(tokens, targets, None if bool(valid.all()) else valid, count=count)
