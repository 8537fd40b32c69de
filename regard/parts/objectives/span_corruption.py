"""Span corruption: stretches of a text are cut out, a sentinel stands for each, and the decoder says what was there.

    text      thank you for inviting me to your party last week
    source    thank you <extra_id_0> me to your party <extra_id_1> week </s>
    target    <extra_id_0> for inviting <extra_id_1> last </s>

How many stretches there are follows from the length; where they stand is drawn: what stays and what goes are each cut
at random into as many parts, and the parts take turns. The loss is that of every next token of the target.

Raffel et al. 2020, "T5", arXiv:1910.10683.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers import AddedToken

from regard.core import UserError
from regard.data.batches import Batch, WindowBatches, teacher_forced
from regard.data.masks import Pieces
from regard.data.tokenizer import Tokenizer

NAME = "<extra_id_{}>"


@dataclass(frozen=True)
class Noise:
    """share:    of the tokens that are cut out.
    span:      tokens of a stretch, in the mean.
    sentinels: that a tokenizer gets which is learned for it.
    """

    share: float = 0.15
    span: float = 3.0
    sentinels: int = 100

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"objective.share must be between 0 and 1, not {self.share}")
        for name in ("span", "sentinels"):
            if getattr(self, name) < 1:
                raise UserError(f"objective.{name} must be at least 1, not {getattr(self, name)}")

    def counts(self, length: int) -> tuple[int, int]:
        """Of a text of `length` tokens, at least 2: how many are cut out, in how many stretches."""
        gone = min(max(round(length * self.share), 1), length - 1)
        return gone, min(max(round(gone / self.span), 1), gone, length - gone)

    def mask(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """(length,) True for what is cut out; the first token stays, the last goes."""
        gone, spans = self.counts(length)
        parts = np.stack((_parts(length - gone, spans, rng), _parts(gone, spans, rng)), 1)
        return np.repeat(np.arange(2 * spans) % 2 == 1, parts.reshape(-1))


def _parts(whole: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count,) sizes, each at least 1, that add up to the whole; every way to do so is as likely."""
    cuts = np.sort(rng.permutation(whole - 1)[: count - 1]) + 1
    return np.diff(cuts, prepend=0, append=whole)


def corrupt(ids: np.ndarray, gone: np.ndarray, sentinels: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Source and target of a text `ids` (time,) from which `gone` (time,) is cut out."""
    return _marked(ids, gone, sentinels, end), _marked(ids, ~gone, sentinels, end)


def _marked(ids: np.ndarray, gone: np.ndarray, sentinels: np.ndarray, end: int) -> np.ndarray:
    """With one sentinel, in their order, in place of each stretch, and an end."""
    first = gone & ~np.concatenate(([False], gone[:-1]))
    marked = np.where(first, sentinels[np.cumsum(first) - 1], ids)
    return np.append(marked[~gone | first], end)


def sentinels_of(tokenizer: Tokenizer) -> np.ndarray:
    """Their numbers, from <extra_id_0> on."""
    found: list[int] = []
    while (number := tokenizer.inner.token_to_id(NAME.format(len(found)))) is not None:
        found.append(number)
    return np.array(found, dtype=np.int64)


def with_sentinels(tokenizer: Tokenizer, count: int) -> Tokenizer:
    """The same with so many sentinels, if it had none."""
    if len(sentinels_of(tokenizer)):
        return tokenizer
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    strip = Pieces(tokenizer).spaced  # the space before what was cut out is gone with it
    names = [NAME.format(i) for i in range(count)]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False, lstrip=strip) for name in names])
    return Tokenizer(inner)


class Corrupter:
    """Of a stretch of text, its source and target: what is cut out depends on the seeds alone."""

    def __init__(self, noise: Noise, tokenizer: Tokenizer, context: int):
        self.noise, self.tokenizer, self.sentinels = noise, tokenizer, sentinels_of(tokenizer)
        if not len(self.sentinels):
            raise UserError(f"this tokenizer has no sentinels ({NAME.format(0)}, ...): let one be learned")
        most = noise.counts(context)[1]
        if most > len(self.sentinels):
            raise UserError(
                f"{context} tokens have {most} stretches cut out, and the tokenizer only {len(self.sentinels)} "
                "sentinels: take a shorter train.context_length, or more of them (objective.sentinels)"
            )

    def __call__(self, ids: np.ndarray, *seeds: int) -> tuple[np.ndarray, np.ndarray]:
        gone = self.noise.mask(len(ids), np.random.default_rng(seeds))
        return corrupt(ids, gone, self.sentinels, self.tokenizer.end)

    def batch(self, rows: list[tuple[np.ndarray, ...]]) -> Batch:
        return teacher_forced(rows, self.tokenizer.start, self.tokenizer.pad)


class Corrupted(WindowBatches):
    """Batches of windows of one long text, each epoch cut at a new offset and with other stretches cut out."""

    def __init__(self, stream: np.ndarray, context: int, rows: int, seed: int, corrupter: Corrupter):
        super().__init__(stream, context, rows, seed)
        self.corrupter = corrupter

    def epoch(self, number: int) -> list[np.ndarray]:
        """Of each row, the epoch and where it begins."""
        return [np.stack((np.full_like(starts, number), starts), 1) for starts in super().epoch(number)]

    def make(self, numbers: np.ndarray) -> Batch:
        stretches = ((self.stream[at : at + self.context], epoch, at) for epoch, at in numbers.tolist())
        return self.corrupter.batch([self.corrupter(ids, self.seed, epoch, at) for ids, epoch, at in stretches])


def in_order(text: np.ndarray, context: int, rows: int, corrupter: Corrupter) -> Iterator[Batch]:
    """All of a text (time,), the same stretches cut out every time; a last token that is alone is left out."""
    begins = [at for at in range(0, len(text), context) if len(text) - at > 1]
    for first in range(0, len(begins), rows):
        some = begins[first : first + rows]
        yield corrupter.batch([corrupter(text[at : at + context], 0, at) for at in some])
