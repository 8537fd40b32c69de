"""The one kind of error that is the user's to mend: a single sentence saying what, where and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """A mistake in a recipe, a file or a call. `path` says where in the recipe, outermost entry first."""

    def __init__(self, message: str, path: tuple[str, ...] = ()):
        super().__init__(message)
        self.message = message
        self.path = path

    def inside(self, entry: str) -> "UserError":
        """The same error, seen from one entry further out."""
        return UserError(self.message, (entry, *self.path))

    def __str__(self) -> str:
        where = ""
        for entry in self.path:
            glue = "" if not where or entry.startswith("[") else (": " if where.endswith(".toml") else ".")
            where += glue + entry
        return f"{where}: {self.message}" if where else self.message


def nearest(word: str, known: Iterable[str]) -> str:
    """The tail of an error sentence: the likeliest right word, and the list when it is short enough to read."""
    known = sorted(known)
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    listing = f" (known: {', '.join(known)})" if len(known) <= 24 else ""
    return hint + listing
