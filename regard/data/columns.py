"""Find the columns of a record that hold the wanted texts, by their names or numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from regard.core import UserError
from regard.errors import nearest

PAIRS = (("source", "target"), ("src", "tgt"), ("input", "output"), ("question", "answer"), ("prompt", "response"),
         ("words", "tags"), ("tokens", "tags"), ("tokens", "ner_tags"), ("word", "pronunciation"), ("word", "phonemes"),
         ("document", "summary"), ("article", "summary"), ("text", "summary"))  # fmt: skip
TWO_TEXTS = (
    ("a", "b"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2"),
    ("text_a", "text_b"), ("sentence_a", "sentence_b"), ("question", "sentence"), ("query", "passage"),
)  # fmt: skip
TEXTS = ("text", "content", "sentence", "document", "review", "tweet", "comment", "message", "utterance")
LABELS = ("label", "category", "class", "intent", "sentiment", "topic", "rating", "stars", "emotion")
SCORES = ("score", "similarity", "similarity_score", "relatedness_score", "gold_label", "is_duplicate")
LABELED = tuple((text, label) for text in TEXTS for label in LABELS)
TRIPLES = tuple((*texts, answer) for texts in TWO_TEXTS for answer in (*LABELS, *SCORES))
LANGUAGES = (
    "ar", "bg", "bn", "cs", "da", "de", "el", "en", "es", "et", "fa", "fi", "fr", "he", "hi", "hr", "hu", "id", "it",
    "ja", "ko", "lt", "lv", "nl", "no", "pl", "pt", "ro", "ru", "sk", "sl", "sv", "th", "tr", "uk", "vi", "zh",
)  # fmt: skip
# Names of columns that number the rows, which are never learned from.
ROW_NUMBERS = ("", "id", "idx", "index", "guid", "uid", "unnamed: 0")
NAMES = {
    *(name for some in (*PAIRS, *TRIPLES, *LABELED) for name in some), *ROW_NUMBERS, "english", "german", "french",
    "spanish", "chinese", "japanese", "translation", "title",
} - {"", "a", "b"}  # fmt: skip
HEADINGS = {*NAMES, *LANGUAGES}
NAME = re.compile(r"[a-z]+(?:[ _-][a-z]+)*(?:[ _-]?[1-9])?")  # "source_text", "sentence 1"
WANTED = {2: "two are wanted (a source and a target, a text and its label, words and their tags)",
          3: "two texts and a label are wanted"}  # fmt: skip

HEADER_QUESTION = (
    "which may be the names of the columns: say --header yes if it is, and --header no if it is an example"
)


class BadRow(NamedTuple):
    """Why a line or row cannot be used."""

    reason: str  # a few words by which such rows are counted
    message: str  # the rest of the sentence that the user is told
    file: str = ""  # its file, where a record comes from several


Row = tuple[str, ...] | BadRow


def escaped(name: Any, max_chars: int = 60) -> str:
    """Return a name from a file with control characters escaped, cut to a length, for a message."""
    return repr(str(name))[1:-1][:max_chars]


def quoted_list(cells: Sequence[Any]) -> str:
    """Return the cells of a line in quotes, with commas between them, for a message."""
    return ", ".join(f"'{escaped(cell, 24)}'" for cell in cells[:8]) + (", ..." if len(cells) > 8 else "")


def has_header(cells: Sequence[str], columns: Sequence[str]) -> bool:
    """Return whether a first line names the columns: it holds a name that was asked for, or only usual names."""
    names = [cell.strip().lower() for cell in cells]
    if any(name in cells for name in columns if not name.isdecimal()):
        return True
    usual = any(set(some) <= set(names) for some in (*PAIRS, *LABELED, *TRIPLES))
    return any(names) and (usual or all(name in HEADINGS or not name for name in names))


def may_be_header(cells: Sequence[str]) -> bool:
    """Return whether every cell of a first line consists of words that usually name columns, as 'source_text' does."""
    names = [cell.strip().lower() for cell in cells]
    words = [re.findall("[a-z]+", name) for name in names]
    return len(set(names)) == len(names) and all(
        NAME.fullmatch(name) and HEADINGS.issuperset(some) and NAMES.intersection(some)
        for name, some in zip(names, words, strict=True)
    )


def has_label_column(names: Sequence[str]) -> bool:
    """Return whether some column has a name that is usual for labels."""
    return any(str(name).strip().lower() in LABELS for name in names)


class ColumnSelector:
    """Selects the wanted texts of a record.

    first:  the names of the columns, or the first record; the columns are found by it.
    header: whether `first` is a line of names, not data.
    """

    def __init__(self, first: list | dict, header: bool, columns: Sequence[str], wanted: int, max_chars: int):
        self.max_chars = max_chars
        if columns and len(columns) != wanted:
            raise UserError(f"{wanted} column{'s are' if wanted > 1 else ' is'} wanted, and {len(columns)} were named")
        names = list(first) if header or isinstance(first, dict) else []
        self.names, self.width = names, len(first)
        self.wanted: tuple[str | int, ...]
        if columns:
            self.wanted = tuple(self._named(column, first, header) for column in columns)
            twice = next((name for at, name in enumerate(self.wanted) if name in self.wanted[:at]), None)
            if twice is not None:
                raise UserError(f"{self._label(twice)} is named twice in --columns {escaped(','.join(columns))}")
        else:
            self.wanted = _default_columns(first, names, wanted, header)

    @property
    def selected(self) -> list[str]:
        """Return the selected columns, by name where they have one, as --columns would give them."""
        return [str(self.names[one] if isinstance(one, int) and self.names else one) for one in self.wanted]

    @property
    def top_level_names(self) -> list[str]:
        """Return the outermost names of the wanted columns, for records that are objects."""
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
                f"there is no column '{escaped(column)}', as the first line is no header: give numbers, 0 to {last}"
            )
        raise UserError(f"there is no column '{escaped(column)}'{nearest(column, map(escaped, self.names))}")

    def __call__(self, record: list | dict) -> Row:
        try:
            row = tuple([record[wanted] for wanted in self.wanted])  # type: ignore[call-overload]
        except (LookupError, TypeError):
            return self._select_checked(record)
        for text in row:
            if not isinstance(text, str) or not text or text.isspace() or len(text) > self.max_chars:
                return self._select_checked(record)
        return row

    def _select_checked(self, record: list | dict) -> Row:
        row = []
        for wanted in self.wanted:
            text = _text(self._value(record, wanted))
            if not isinstance(text, BadRow):
                text = self._checked(text)
            if isinstance(text, BadRow):
                return BadRow(text.reason, f"{self._label(wanted)} {text.message}")
            row.append(text)
        return tuple(row)

    def _checked(self, text: str) -> str | BadRow:
        if not text or text.isspace():
            return BadRow("empty", "is empty")
        if len(text) > self.max_chars:
            return BadRow("too long", f"has {len(text):,} characters, more than {self.max_chars:,}")
        return text

    def _label(self, wanted: str | int) -> str:
        name = self.names[wanted] if isinstance(wanted, int) and self.names else wanted
        return f"column '{escaped(name)}'" if isinstance(name, str) else f"column {name}"

    def _value(self, record: list | dict, wanted: str | int) -> Any:
        if isinstance(record, list):
            if isinstance(wanted, int) and wanted < len(record):
                return record[wanted]
            return BadRow("too few columns", f"is missing: {len(record)} column{'s' * (len(record) != 1)} here")
        if wanted in record:
            return record[wanted]
        here: Any = record
        for name in str(wanted).split("."):
            if not isinstance(here, dict) or name not in here:
                return BadRow("no such column", f"is missing{nearest(str(wanted), map(escaped, record))}")
            here = here[name]
        return here


def _default_columns(first: list | dict, names: list[str], wanted: int, header: bool) -> tuple[str | int, ...]:
    """Return the columns when the user names none; refuse where there are too many and none has a usual name."""
    if not names:
        there = len(first)
        while there > wanted and first[there - 1] in ("", None):  # type: ignore[index]
            there -= 1
        if there == wanted:
            return tuple(range(wanted))
        raise UserError(_too_many(list(first[:there]), wanted, ()) if there > wanted else _too_few(there, wanted))  # type: ignore[index]
    chosen = usual_columns(names, wanted)
    if chosen is None:
        raise UserError(_too_few(len(names), wanted) if len(names) < wanted else _too_many(names, wanted, names))
    return tuple(names.index(name) for name in chosen) if header else tuple(chosen)


def usual_columns(names: list[str], wanted: int) -> list[str] | None:
    """Return the columns with usual names, or all where there are no others; None: it is ambiguous."""
    by_lower = {str(name).strip().lower(): name for name in reversed(names)}
    usual = {2: (*PAIRS, *LABELED), 3: TRIPLES}.get(wanted, tuple((name,) for name in (*TEXTS, "source", "src")))
    for some in usual:
        if all(name in by_lower for name in some):
            return [by_lower[name] for name in some]
    useful = [name for lower, name in reversed(by_lower.items()) if lower not in ROW_NUMBERS]
    languages = [name for name in useful if name.strip().lower() in LANGUAGES]
    if wanted == 2 and len(languages) == 2:
        return languages
    return next((some for some in (names, useful) if len(some) == wanted), None)


def _too_few(there: int, wanted: int) -> str:
    what = {2: "a source and a target are", 3: "two texts and a label are"}.get(wanted, "a text is")
    return f"{what} wanted, and there {({0: 'is no column', 1: 'is one column'}).get(there, f'are {there} columns')}"


def _too_many(cells: Sequence[Any], wanted: int, names: Sequence[str]) -> str:
    """Return the message that asks which columns are meant. names: of the columns, where they have any."""
    useful = [name for name in names if name.strip().lower() not in ROW_NUMBERS]
    some = (useful if len(useful) >= wanted else names)[:wanted] or range(wanted)
    ways = [f"say which, such as --columns {','.join(map(str, some))}"]
    ways += [] if names else ["if this line is their names, --header yes"]
    ways += ["for two texts and a label, --task match"] if wanted == 2 and len(cells) == 3 else []
    ways += ["for a text and its label, --task classify"] if wanted == 1 and len(cells) == 2 else []
    what = WANTED.get(wanted, "one text is wanted")
    return f"there are {len(cells)} columns ({quoted_list(cells)}), and {what}: {'; '.join(ways)}"


def _text(value: Any) -> str | BadRow:
    """Return a cell as text: numbers are written out, lists of words joined by spaces."""
    if isinstance(value, str | BadRow):
        return value
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return BadRow("not UTF-8", "is not UTF-8")
    if isinstance(value, list) and all(isinstance(word, str | int) for word in value):
        return " ".join(map(str, value))
    if isinstance(value, bool | int | float):
        return str(value)
    return BadRow("not text", f"is not a text but {type(value).__name__}")
