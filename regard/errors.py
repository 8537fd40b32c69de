"""The error for mistakes of the user: one sentence that says what is wrong, where, and what to do."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from .synonyms import SYNONYMS

MAX_MESSAGE = 1000  # characters of a message
# Control characters but for the line end and the tab, marks that turn the direction of writing, halves of characters.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class UserError(ValueError):
    """A mistake in a recipe, a file or a call.

    path: where in the recipe, outermost entry first.
    file: the recipe's file, or its name when it is one of regard's own.
    """

    def __init__(self, message: str, path: tuple[str, ...] = (), file: str = ""):
        message = " ".join(message.split("\n"))
        if len(message) > MAX_MESSAGE:
            message = f"{message[: MAX_MESSAGE - 4]} ..."
        super().__init__(message)
        self.message = message
        self.path = path
        self.file = file

    def inside(self, entry: str) -> "UserError":
        """Return the same error with one more enclosing entry in its path."""
        return UserError(self.message, (entry, *self.path), self.file)

    def of(self, file: str) -> "UserError":
        """Return the same error with its file, unless it names one already."""
        return UserError(self.message, self.path, self.file or file)

    def __str__(self) -> str:
        where = ""
        for entry in self.path:
            where += entry if not where or entry.startswith("[") else "." + entry
        return ": ".join(piece for piece in (self.file, where, self.message) if piece)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the closest known word, and the list of all when it is short."""
    known = sorted(known)
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    listing = f" (known: {', '.join(known)})" if 0 < len(known) <= 24 else ""
    return hint + listing


def nearest_key(section: str, key: str, known: Iterable[str]) -> str:
    """Return the same for a key of a recipe's section: the closest keys with their path, or regard's name for another
    program's setting."""
    known = sorted(known)
    near = [f"'{section}.{one}'" for one in get_close_matches(key, known, n=3, cutoff=0.6)]
    if key in SYNONYMS:
        near = [f"'{SYNONYMS[key]}'"]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return hint + (f" (known: {', '.join(known)})" if len(known) <= 24 else " (`regard settings` lists them)")


def short(path: str | Path) -> str:
    """A path as one would type it here: relative when it is inside the working directory."""
    whole = Path(path).absolute()
    return str(whole.relative_to(Path.cwd())) if whole.is_relative_to(Path.cwd()) else str(whole)


def shown(value: object) -> str:
    """Return the repr of a value for a message, shortened when it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def in_one_line(error: BaseException) -> str:
    """Return the message of any exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] or type(error).__name__


def printable(text: str) -> str:
    """Return an untrusted text that is safe to print: control characters, which could move the cursor or hide text, and
    lone surrogates are written as \\u001b. Line ends and tabs stay."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
