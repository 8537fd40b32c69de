"""Which columns of a record are the texts that are wanted, by their names or numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from regard.core import UserError
from regard.core.errors import nearest

PAIRS = (("source", "target"), ("src", "tgt"), ("input", "output"), ("question", "answer"), ("prompt", "response"),
         ("words", "tags"), ("tokens", "tags"), ("tokens", "ner_tags"))  # fmt: skip
TRIPLES = (
    ("a", "b", "label"), ("a", "b", "score"), ("sentence1", "sentence2", "label"), ("sentence1", "sentence2", "score"),
    ("premise", "hypothesis", "label"), ("question1", "question2", "is_duplicate"), ("text1", "text2", "label"),
    ("question", "sentence", "label"),
)  # fmt: skip
TEXTS = ("text", "content", "sentence", "document")
LANGUAGES = (
    "ar bg bn cs da de el en es et fa fi fr he hi hr hu id it ja ko lt lv nl no pl pt ro ru sk sl sv th tr uk vi zh"
)
HEADINGS = {
    *(name for pair in PAIRS for name in pair), *TEXTS, *LANGUAGES.split(), "id", "label", "category", "word",
    "pronunciation", "phonemes", "english", "german", "french", "spanish", "chinese", "japanese", "translation",
    "summary", "title", "score", "intent", "class",
}  # fmt: skip


class Bad(NamedTuple):
    """What is wrong with a line."""

    reason: str  # two words, for counting
    what: str  # for the sentence that is told
    file: str = ""  # which of several


Row = tuple[str, ...] | Bad


def shown(name: Any, most: int = 60) -> str:
    """A name out of a file, fit for a sentence."""
    return repr(str(name))[1:-1][:most]


def has_header(cells: Sequence[str], columns: Sequence[str], form: str) -> bool:
    """Is this first line the names of the columns? Yes if it holds a name that was asked for, or only usual names."""
    if form not in ("tsv", "csv"):
        return False
    names = [cell.strip().lower() for cell in cells]
    if any(name in cells for name in columns):
        return True
    usual = any(set(some) <= set(names) for some in (*PAIRS, *TRIPLES))
    return bool(names) and (usual or all(name in HEADINGS for name in names))


class Pick:
    """Takes the wanted texts out of a record.

    first:  the names of the columns, or a record: by it the columns are found.
    header: `first` is a line of names, not data.
    """

    def __init__(self, first: list | dict, header: bool, columns: Sequence[str], wanted: int, longest: int):
        self.longest = longest
        if columns and len(columns) != wanted:
            raise UserError(f"{wanted} column{'s are' if wanted > 1 else ' is'} wanted, and {len(columns)} were named")
        names = list(first) if header or isinstance(first, dict) else []
        self.names = names
        self.wanted: tuple[str | int, ...]
        if columns:
            self.wanted = tuple(self._named(column, first, header) for column in columns)
        else:
            self.wanted = _usual(first, names, wanted, header)

    @property
    def tops(self) -> list[str]:
        """The outermost names, of a record that is an object."""
        return list(dict.fromkeys(self._top(str(name)) for name in self.wanted))

    def _top(self, name: str) -> str:
        return name if name in self.names else name.partition(".")[0]

    def _named(self, column: str, first: list | dict, header: bool) -> str | int:
        if column in self.names:
            return self.names.index(column) if header else column
        if isinstance(first, dict) and "." in column and column.partition(".")[0] in first:
            return column
        if re.fullmatch(r"\d{1,6}", column):
            if int(column) >= len(first):
                raise UserError(f"there is no column {column}: there are {len(first)}, counted from 0")
            return int(column) if isinstance(first, list) else self.names[int(column)]
        if not self.names:
            last = len(first) - 1
            raise UserError(
                f"there is no column '{shown(column)}', as the first line is no header: give numbers, 0 to {last}"
            )
        raise UserError(f"there is no column '{shown(column)}'{nearest(column, map(shown, self.names))}")

    def __call__(self, record: list | dict) -> Row:
        try:
            row = tuple([record[wanted] for wanted in self.wanted])  # type: ignore[call-overload]
        except (LookupError, TypeError):
            return self._with_care(record)
        for text in row:
            if not isinstance(text, str) or not text or text.isspace() or len(text) > self.longest:
                return self._with_care(record)
        return row

    def _with_care(self, record: list | dict) -> Row:
        row = []
        for wanted in self.wanted:
            text = _text(self._value(record, wanted))
            if not isinstance(text, Bad):
                text = self._checked(text)
            if isinstance(text, Bad):
                return Bad(text.reason, f"{self._label(wanted)} {text.what}")
            row.append(text)
        return tuple(row)

    def _checked(self, text: str) -> str | Bad:
        if not text or text.isspace():
            return Bad("empty", "is empty")
        if len(text) > self.longest:
            return Bad("too long", f"has {len(text):,} characters, more than {self.longest:,}")
        return text

    def _label(self, wanted: str | int) -> str:
        name = self.names[wanted] if isinstance(wanted, int) and self.names else wanted
        return f"column '{shown(name)}'" if isinstance(name, str) else f"column {name}"

    def _value(self, record: list | dict, wanted: str | int) -> Any:
        if isinstance(record, list):
            if isinstance(wanted, int) and wanted < len(record):
                return record[wanted]
            return Bad("too few columns", f"is missing: {len(record)} column{'s' * (len(record) != 1)} here")
        if wanted in record:
            return record[wanted]
        here: Any = record
        for name in str(wanted).split("."):
            if not isinstance(here, dict) or name not in here:
                return Bad("no such column", f"is missing{nearest(str(wanted), map(shown, record))}")
            here = here[name]
        return here


def _usual(first: list | dict, names: list[str], wanted: int, header: bool) -> tuple[str | int, ...]:
    """The columns when none are named."""
    by_lower = {str(name).strip().lower(): name for name in reversed(names)}
    usual = {2: PAIRS, 3: TRIPLES}.get(wanted, tuple((name,) for name in (*TEXTS, "source", "src")))
    chosen = next(([by_lower[name] for name in some] for some in usual if all(name in by_lower for name in some)), None)
    if chosen is None:
        chosen = names[:wanted]
    if names and len(chosen) == wanted:
        return tuple(names.index(name) for name in chosen) if header else tuple(chosen)
    if len(first) < wanted:
        what = {2: "a source and a target are", 3: "two texts and a label are"}.get(wanted, "a text is")
        there = {0: "is no column", 1: "is one column"}.get(len(first), f"are {len(first)} columns")
        raise UserError(f"{what} wanted, and there {there}")
    return tuple(range(wanted))


def _text(value: Any) -> str | Bad:
    """Numbers are written out, lists of words joined by spaces."""
    if isinstance(value, str | Bad):
        return value
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return Bad("not UTF-8", "is not UTF-8")
    if isinstance(value, list) and all(isinstance(word, str | int) for word in value):
        return " ".join(map(str, value))
    if isinstance(value, bool | int | float):
        return str(value)
    return Bad("not text", f"is not a text but {type(value).__name__}")
