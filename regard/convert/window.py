"""Convert the sliding window of config.json, which counts the token itself, to a pattern and back."""

from __future__ import annotations

import re

from regard.core import UserError


def pattern_of(window: int | None) -> str:
    return "causal" if window is None else f"causal & window({window})"


def window_of(pattern: str | None) -> int | None:
    found = re.fullmatch(r"causal(?: & window\((\d+)\))?", str(pattern or "causal"))
    if found is None:
        raise UserError(f"the pattern '{pattern}' cannot be exported: 'causal' can, and 'causal & window(4096)'")
    return int(found[1]) if found[1] else None
