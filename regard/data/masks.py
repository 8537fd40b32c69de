"""What a masked language model needs to know about its tokenizer: the mask, the special tokens around texts, and which
tokens are pieces of one word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models
from tokenizers.processors import TemplateProcessing

from .tokenizer import BYTE_VALUES, Tokenizer

MASK = "[MASK]"
MASK_NAMES = (MASK, "<mask>", "<MASK>", "<|mask|>")
SPACE = "\u2581"  # how sentencepiece writes a space


def mask_token(tokenizer: Tokenizer) -> str | None:
    """Return the mask token; None: the tokenizer has none."""
    return next((name for name in MASK_NAMES if tokenizer.inner.token_to_id(name) is not None), None)


def with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with a mask, and with start and end tokens around texts and pairs, where it had none."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    if mask_token(tokenizer) is None:
        spaced = Pieces(tokenizer).spaced  # the mask replaces a piece and the space before it
        inner.add_special_tokens([AddedToken(MASK, special=True, normalized=False, lstrip=spaced)])
    if not tokenizer.adds_special_tokens:
        marks = {str(inner.id_to_token(number)): number for number in (tokenizer.start, tokenizer.end)}
        start, end = (str(inner.id_to_token(number)) for number in (tokenizer.start, tokenizer.end))
        inner.post_processor = TemplateProcessing(
            single=f"{start} $A {end}", pair=f"{start} $A {end} $B:1 {end}:1", special_tokens=list(marks.items())
        )
    return Tokenizer(inner)


@contextmanager
def parsing_special_tokens(tokenizer: Tokenizer) -> Iterator[None]:
    """Within this context, '[MASK]' in a text is the mask token, and likewise for other special tokens."""
    tokenizer.inner.encode_special_tokens = False
    try:
        yield
    finally:
        tokenizer.inner.encode_special_tokens = True


class Pieces:
    """How tokens form words. '##' marks a piece that continues a word; a space, 'Ġ' or '▁' one that begins a word;
    where there is neither, adjacent letters and digits are one word."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, inner = tokenizer, tokenizer.inner
        self.word_level = isinstance(inner.model, models.WordLevel)
        self.prefix = inner.model.continuing_subword_prefix if isinstance(inner.model, models.WordPiece) else ""
        self.byte_level = any("ByteLevel" in repr(step) for step in (inner.pre_tokenizer, inner.decoder))
        self.added = set(inner.get_added_tokens_decoder())

    def text(self, name: str) -> str:
        """Return the text of a token, with the space before it if it has one."""
        if name in BYTE_VALUES:
            return BYTE_VALUES[name].decode("utf-8", "replace")
        if self.byte_level:
            return decoders.ByteLevel().decode([name])
        return name.removeprefix(self.prefix) if self.prefix else name.replace(SPACE, " ")

    def continues(self, name: str) -> bool:
        """Return whether a token continues a word, by its name alone."""
        return bool(self.prefix) and name.startswith(self.prefix)

    @cached_property
    def names(self) -> list[str | None]:
        """Return the tokens by id; None for special tokens and unused ids."""
        inner = self.tokenizer.inner
        return [None if i in self.added else inner.id_to_token(i) for i in range(self.tokenizer.size)]

    @cached_property
    def texts(self) -> list[str]:
        return ["" if name is None else self.text(name) for name in self.names]

    @cached_property
    def ordinary(self) -> np.ndarray:
        """Return which tokens are not special, (vocab,)."""
        marks = {self.tokenizer.pad, self.tokenizer.start, self.tokenizer.end}
        return np.array([name is not None and i not in marks for i, name in enumerate(self.names)])

    @cached_property
    def spaced(self) -> bool:
        """Return whether pieces include the space before them."""
        return not self.word_level and any(text[:1] == " " and len(text) > 1 for text in self.texts)

    @cached_property
    def ends_line(self) -> np.ndarray:
        """Return which tokens end a line, (vocab,): those with a line feed, and the end token."""
        found = np.array(["\n" in text for text in self.texts])
        found[self.tokenizer.end] = True
        return found

    @cached_property
    def _open(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two (vocab,) masks: which tokens may continue a word, and which may be continued."""
        if self.word_level:
            return np.zeros(self.tokenizer.size, bool), np.zeros(self.tokenizer.size, bool)
        if self.prefix:
            left = np.array([name is not None and self.continues(name) for name in self.names])
            return left, self.ordinary
        ends = [(_inside(text[:1]), _inside(text[-1:])) for text in self.texts]
        left, right = np.array(ends).T
        return left, right

    def words(self, ids: np.ndarray) -> np.ndarray:
        """Return the index of the word that each token belongs to, (time,)."""
        left, right = self._open
        begins = np.ones(len(ids), bool)
        begins[1:] = ~(left[ids[1:]] & right[ids[:-1]])
        return begins.cumsum() - 1


def _inside(letter: str) -> bool:
    """Return whether a character is inside a word, or part of a character that is written as bytes."""
    return letter.isalnum() or letter == "\ufffd"


class Template(NamedTuple):
    """The special tokens around one text, or around and between two."""

    marks: list[np.ndarray]  # before the first text, (between the two,) after the last
    segments: list[np.ndarray]  # the segment ids of those tokens
    text_segments: list[int]  # the segment id of each text

    @classmethod
    def read(cls, tokenizer: Tokenizer, texts: int) -> Template:
        """Return the template that the tokenizer applies to this number of texts."""
        names = (name for name in Pieces(tokenizer).names[::-1] if name is not None)
        name = next(name for name in names if tokenizer.encode([name])[0])
        one = tokenizer.inner.encode(*[name] * texts, add_special_tokens=True)
        marks: list[list[int]] = [[] for _ in range(texts + 1)]
        segments: list[list[int]] = [[] for _ in range(texts + 1)]
        text_segments = [0] * texts
        at = 0
        for number, segment, text in zip(one.ids, one.type_ids, one.sequence_ids, strict=True):
            if text is None:
                marks[at].append(number)
                segments[at].append(segment)
            else:
                at, text_segments[text] = text + 1, segment
        return cls(
            [np.array(some, np.int64) for some in marks], [np.array(some, np.int64) for some in segments], text_segments
        )

    @property
    def size(self) -> int:
        """Return the number of special tokens."""
        return sum(map(len, self.marks))

    def apply(self, texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids with special tokens, and their segment ids, (time,) each."""
        ids, segments = [self.marks[0]], [self.segments[0]]
        for text, segment, marks, theirs in zip(
            texts, self.text_segments, self.marks[1:], self.segments[1:], strict=True
        ):
            ids += [text, marks]
            segments += [np.full(len(text), segment), theirs]
        return np.concatenate(ids), np.concatenate(segments)
