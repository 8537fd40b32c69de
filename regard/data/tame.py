"""Refuse tokenizers that could blow up texts, before they are used.

A tokenizer.json is a program: forty replacements of "a" by "aa" turn one letter into 2^40. A step turns n characters or
tokens into at most f n + c, and another step (f', c') after it into f' f n + f' c + c': both are bounded.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import tokenizers

from regard.core import UserError

GROWTH = 1000  # a text may become this many times longer
LONGEST = 1000  # characters or tokens that may be added to a text
STEPS = 1000
TOKEN = 10_000  # the most characters of a token
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

# A pattern that cannot match the empty string: letters, escaped characters and classes, some of them repeated. Any
# other pattern is assumed to match between characters too, where a replacement is inserted without removing anything.
NEVER_EMPTY = re.compile(
    r"(?:(?:[^\\()\[\]{}^$*?|+]|\\[sSdDwWnrt.+*?|/\\()\[\]{}^$-]|\\[pP]\{\^?\w+\}|\[\^?(?:[^\\\[\]&]|\\[sSdDwWnrt])+\])"
    r"(?:\+|\{[1-9]\d*(?:,\d*)?\})?)+"
)
# The most characters that one becomes. Successive normalization forms do not multiply: what one has decomposed, the
# next leaves alone.
FORMS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "BertNormalizer": 4, "StripAccents": 1}
OTHERS = {
    "ByteLevel": 5,  # one letter for each of its bytes, and a space before it
    "Metaspace": 2,  # a mark before each piece
    "WordPiece": 2,  # of decoders: a space before each token
    "BPEDecoder": 2,  # a space for a suffix, which may be empty
    "CTC": 2,
}
ADDED_TOKENS = {"BertProcessing": 4, "RobertaProcessing": 4}  # tokens


class Growth(NamedTuple):
    """A bound: a text of n characters becomes one of at most times * n + more."""

    times: float = 1.0
    more: float = 0.0

    def then(self, step: Growth) -> Growth:
        """Return the growth of both, this one first."""
        return Growth(
            min(self.times * step.times, 2.0 * GROWTH), min(self.more * step.times + step.more, 2.0 * LONGEST)
        )


def check_growth(table: Any) -> None:
    """Refuse a tokenizer.json by which texts or tokens could become too long."""
    if not isinstance(table, dict):
        return  # the library reports what is wrong
    _check_tokens(table)
    steps = _plain(table)
    for parts in (PARTS[:3], PARTS[3:]):
        growth = _sequence_growth(steps.get(part) for part in parts)
        if growth.times > GROWTH:
            raise UserError(f"its steps could make a text more than {GROWTH:,} times longer")
        if growth.more > LONGEST:
            raise UserError(f"its steps could put more than {LONGEST:,} characters before each text or after it")


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    """Return the steps as the library parses them, since it also accepts old names and steps without a type."""
    bare = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    steps = {part: table.get(part) for part in PARTS}
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    return json.loads(tokenizers.Tokenizer.from_str(json.dumps(bare | steps | {"model": model})).to_str())


def _check_tokens(table: dict[str, Any]) -> None:
    model = table.get("model")
    model = model if isinstance(model, dict) else {}
    vocab, added = model.get("vocab"), table.get("added_tokens")
    texts = list(vocab) if isinstance(vocab, dict) else []
    texts += [one[0] for one in vocab if isinstance(one, list) and one] if isinstance(vocab, list) else []
    texts += [one.get("content") for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > TOKEN:
        raise UserError(f"has a token of {longest:,} characters, and {TOKEN:,} are the most")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if len(str(model.get(name))) > LONGEST:
            raise UserError(f"has a {name} of more than {LONGEST:,} characters")


def _sequence_growth(steps: Iterable[Any]) -> Growth:
    """Return how much a text grows in consecutive steps."""
    total, form = Growth(), 1.0  # form: the growth of the normalization forms since the last other step
    for step in steps:
        kind = step.get("type") if isinstance(step, dict) else None
        if kind in FORMS:
            form = max(form, FORMS[kind])
        else:
            total, form = total.then(Growth(form)).then(_growth(step)), 1.0
    return total.then(Growth(form))


def _growth(step: Any) -> Growth:
    if not isinstance(step, dict):
        return Growth()
    kind = step.get("type")
    if kind == "Sequence":
        steps = next((found for found in step.values() if isinstance(found, list)), [])
        if len(steps) > STEPS:
            raise UserError(f"has a sequence of {len(steps):,} steps, and {STEPS:,} are the most")
        return _sequence_growth(steps)
    if kind == "Replace":
        return _replace_growth(step["pattern"], step["content"])
    if kind == "Prepend":
        return Growth(1.0, len(step["prepend"]))
    if kind == "Precompiled":
        return Growth(_charsmap_growth(step["precompiled_charsmap"]))
    if kind == "TemplateProcessing":
        single, pair = (_template_growth(step[name], step["special_tokens"]) for name in ("single", "pair"))
        return Growth(max(single.times, pair.times), max(single.more, pair.more))
    return Growth(OTHERS.get(kind, 1), ADDED_TOKENS.get(kind, 0))


def _replace_growth(pattern: dict[str, str], content: str) -> Growth:
    length = float(len(content))
    if text := pattern.get("String"):
        return Growth(max(1.0, length / len(text)))
    may_be_empty = not NEVER_EMPTY.fullmatch(pattern.get("Regex", ""))
    return Growth(length + 1, length) if may_be_empty else Growth(max(1.0, length))


def _charsmap_growth(coded: str) -> float:
    """Return the length of the longest replacement. The data is the size of a trie, the trie, and the replacements,
    separated by zeros."""
    data = base64.b64decode(coded)
    begin = 4 + int.from_bytes(data[:4], "little")
    return float(max((len(one.decode("utf-8", "replace")) for one in data[begin:].split(b"\0")), default=1) or 1)


def _template_growth(pieces: list[dict[str, Any]], special: dict[str, dict[str, Any]]) -> Growth:
    """Return how often a template repeats a text, and how many tokens it adds."""
    texts = Counter(one["Sequence"]["id"] for one in pieces if "Sequence" in one)
    names = [one["SpecialToken"]["id"] for one in pieces if "SpecialToken" in one]
    tokens = sum(len(special[name]["ids"]) for name in names if name in special)
    return Growth(max(texts.values(), default=1), tokens)
