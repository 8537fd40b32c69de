"""What a masked language model wants to know about its tokenizer: the mask, the marks around texts, and which tokens
are pieces of one word."""

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
SPACE = "\u2581"  # how sentencepiece writes it


def mask_token(tokenizer: Tokenizer) -> str | None:
    """How the mask is called, where there is one."""
    return next((name for name in MASK_NAMES if tokenizer.inner.token_to_id(name) is not None), None)


def with_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same with a mask, and with start and end around texts and pairs of texts, where it had none."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    if mask_token(tokenizer) is None:
        spaced = Pieces(tokenizer).spaced  # the mask stands for a piece with the space before it
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
    """Meanwhile, '[MASK]' in a text is the mask; as are other marks."""
    tokenizer.inner.encode_special_tokens = False
    try:
        yield
    finally:
        tokenizer.inner.encode_special_tokens = True


class Pieces:
    """How tokens make words. '##' begins what continues a word; a space, 'Ġ' or '▁' stands before what begins one;
    where there is neither, letters and digits side by side are a word."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, inner = tokenizer, tokenizer.inner
        self.word_level = isinstance(inner.model, models.WordLevel)
        self.prefix = inner.model.continuing_subword_prefix if isinstance(inner.model, models.WordPiece) else ""
        self.byte_level = any("ByteLevel" in repr(step) for step in (inner.pre_tokenizer, inner.decoder))
        self.added = set(inner.get_added_tokens_decoder())

    def text(self, name: str) -> str:
        """What a token is in a text, with the space before it if it has one."""
        if name in BYTE_VALUES:
            return BYTE_VALUES[name].decode("utf-8", "replace")
        if self.byte_level:
            return decoders.ByteLevel().decode([name])
        return name.removeprefix(self.prefix) if self.prefix else name.replace(SPACE, " ")

    def continues(self, name: str) -> bool:
        """By its name alone."""
        return bool(self.prefix) and name.startswith(self.prefix)

    @cached_property
    def names(self) -> list[str | None]:
        """By number; None for marks, and where there is no token."""
        inner = self.tokenizer.inner
        return [None if i in self.added else inner.id_to_token(i) for i in range(self.tokenizer.size)]

    @cached_property
    def texts(self) -> list[str]:
        return ["" if name is None else self.text(name) for name in self.names]

    @cached_property
    def ordinary(self) -> np.ndarray:
        """(vocab,) True where a token is no mark."""
        marks = {self.tokenizer.pad, self.tokenizer.start, self.tokenizer.end}
        return np.array([name is not None and i not in marks for i, name in enumerate(self.names)])

    @cached_property
    def spaced(self) -> bool:
        """Pieces come with the space before them."""
        return not self.word_level and any(text[:1] == " " and len(text) > 1 for text in self.texts)

    @cached_property
    def ends_line(self) -> np.ndarray:
        """(vocab,) True where a line ends: with a line feed, or the end mark."""
        found = np.array(["\n" in text for text in self.texts])
        found[self.tokenizer.end] = True
        return found

    @cached_property
    def _open(self) -> tuple[np.ndarray, np.ndarray]:
        """(vocab,) twice: a token may go on with a word, and a word may go on after it."""
        if self.word_level:
            return np.zeros(self.tokenizer.size, bool), np.zeros(self.tokenizer.size, bool)
        if self.prefix:
            left = np.array([name is not None and self.continues(name) for name in self.names])
            return left, self.ordinary
        ends = [(_inside(text[:1]), _inside(text[-1:])) for text in self.texts]
        left, right = np.array(ends).T
        return left, right

    def words(self, ids: np.ndarray) -> np.ndarray:
        """(time,) the number of the word that each token is of."""
        left, right = self._open
        begins = np.ones(len(ids), bool)
        begins[1:] = ~(left[ids[1:]] & right[ids[:-1]])
        return begins.cumsum() - 1


def _inside(letter: str) -> bool:
    """Of a word, or of a character that is written in bytes."""
    return letter.isalnum() or letter == "\ufffd"


class Template(NamedTuple):
    """The marks around one text, or around and between two."""

    marks: list[np.ndarray]  # before the first text, (between the two,) after the last
    segments: list[np.ndarray]  # of those marks
    of: list[int]  # the segment of each text

    @classmethod
    def read(cls, tokenizer: Tokenizer, texts: int) -> Template:
        """As the tokenizer sets them."""
        names = (name for name in Pieces(tokenizer).names[::-1] if name is not None)
        name = next(name for name in names if tokenizer.encode([name])[0])
        one = tokenizer.inner.encode(*[name] * texts, add_special_tokens=True)
        marks: list[list[int]] = [[] for _ in range(texts + 1)]
        segments: list[list[int]] = [[] for _ in range(texts + 1)]
        of = [0] * texts
        at = 0
        for number, segment, text in zip(one.ids, one.type_ids, one.sequence_ids, strict=True):
            if text is None:
                marks[at].append(number)
                segments[at].append(segment)
            else:
                at, of[text] = text + 1, segment
        return cls([np.array(some, np.int64) for some in marks], [np.array(some, np.int64) for some in segments], of)

    @property
    def size(self) -> int:
        """How many marks there are."""
        return sum(map(len, self.marks))

    def apply(self, texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens with their marks, and the segment of each."""
        ids, segments = [self.marks[0]], [self.segments[0]]
        for text, segment, marks, theirs in zip(texts, self.of, self.marks[1:], self.segments[1:], strict=True):
            ids += [text, marks]
            segments += [np.full(len(text), segment), theirs]
        return np.concatenate(ids), np.concatenate(segments)
