"""Tokenizers whose text grows without bound are refused before they are used.

A tokenizer.json is a programme: a sequence of forty replacements of "a" by "aa" makes 2^40 letters of one. Each step
makes a text at most so many times longer; the product of all of them is bounded.
"""

from __future__ import annotations

import base64
import math
import re
from typing import Any

from regard.core import UserError

GROWTH = 1000  # times longer may a text become
STEPS = 1000
LONGEST = 1000  # characters that are put before a text
NOTHING = re.compile(r"\(\?|\\[bBAzZG]|[\^$*?|]|\{0")  # what a pattern needs to match between two characters
BYTES = 4  # letters that a character becomes, one for each of its bytes


def must_be_tame(table: Any) -> None:
    """table: what tokenizer.json holds."""
    if not isinstance(table, dict):
        return  # the library says what is wrong
    before = math.prod(_growth(table.get(part)) for part in ("normalizer", "pre_tokenizer", "post_processor"))
    if max(before, _growth(table.get("decoder"))) > GROWTH:
        raise UserError(f"its steps could make a text more than {GROWTH:,} times longer")


def _growth(step: Any) -> float:
    """How many times longer a text becomes at the most."""
    if not isinstance(step, dict):
        return 1.0
    kind = step.get("type")
    if kind == "Sequence":
        steps = next((found for found in step.values() if isinstance(found, list)), [])
        if len(steps) > STEPS:
            raise UserError(f"has a sequence of {len(steps):,} steps, and {STEPS:,} are the most")
        return min(math.prod(map(_growth, steps)), 2.0 * GROWTH)
    if kind == "Replace":
        return _replaced(step.get("pattern"), step.get("content"))
    if kind == "Prepend" and len(str(step.get("prepend"))) > LONGEST:
        raise UserError(f"puts more than {LONGEST:,} characters before each text")
    if kind == "ByteLevel":
        return BYTES
    if kind == "Precompiled":
        return _charsmap(step.get("precompiled_charsmap"))
    if kind == "TemplateProcessing":
        return max(_template(step.get(name)) for name in ("single", "pair"))
    return 1.0


def _replaced(pattern: Any, content: Any) -> float:
    length = len(content) if isinstance(content, str) else 0
    if isinstance(pattern, str):
        pattern = {"String": pattern}
    if not isinstance(pattern, dict):
        return 1.0
    if isinstance(pattern.get("String"), str):
        found = pattern["String"]
        return max(1.0, length / len(found)) if found else length + 1.0
    between = NOTHING.search(str(pattern.get("Regex"))) is not None
    return length + 1.0 if between else max(1.0, float(length))


def _charsmap(coded: Any) -> float:
    """Its longest replacement: they stand behind the trie, whose size comes first, with zeros between them."""
    try:
        data = base64.b64decode(coded)
    except (ValueError, TypeError):
        return 1.0
    begin = 4 + int.from_bytes(data[:4], "little")
    return float(max((len(one) for one in data[begin:].split(b"\0")), default=1) or 1)


def _template(pieces: Any) -> float:
    """How often the text itself stands in it."""
    return max(float(str(pieces).count("'Sequence'")), 1.0) if isinstance(pieces, list) else 1.0
