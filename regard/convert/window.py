"""How far back a decoder looks, as config.json says it (the token itself is counted) and as a pattern."""

from __future__ import annotations

import re

from regard.core import UserError


def pattern_of(window: int | None) -> str:
    return "causal" if window is None else f"causal & window({window})"


def window_of(pattern: str | None) -> int | None:
    found = re.fullmatch(r"causal(?: & window\((\d+)\))?", str(pattern or "causal"))
    if found is None:
        raise UserError(f"the pattern '{pattern}' cannot go out: 'causal' can, and 'causal & window(4096)'")
    return int(found[1]) if found[1] else None
