"""Span corruption: spans of a text are replaced by sentinels, and the decoder predicts what was removed.

    text      thank you for inviting me to your party last week
    source    thank you <extra_id_0> me to your party <extra_id_1> week </s>
    target    <extra_id_0> for inviting <extra_id_1> last </s>

The number of spans follows from the length and their places are random: kept and removed tokens are each partitioned at
random into as many parts, which alternate. The loss is that of next-token prediction on the target.

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

SENTINEL = "<extra_id_{}>"


@dataclass(frozen=True)
class SpanNoise:
    """share:    share of the tokens that are removed.
    span:      mean length of a span in tokens.
    sentinels: number of sentinels in a newly trained tokenizer.
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
        """Return how many of `length` tokens (at least 2) are removed, and in how many spans."""
        removed = min(max(round(length * self.share), 1), length - 1)
        return removed, min(max(round(removed / self.span), 1), removed, length - removed)

    def mask(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Return a mask (length,) of the removed tokens. The first token is kept, the last is removed."""
        removed, spans = self.counts(length)
        parts = np.stack((_random_partition(length - removed, spans, rng), _random_partition(removed, spans, rng)), 1)
        return np.repeat(np.arange(2 * spans) % 2 == 1, parts.reshape(-1))


def _random_partition(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return `count` sizes of at least 1 that sum to `total`, drawn uniformly."""
    cuts = np.sort(rng.permutation(total - 1)[: count - 1]) + 1
    return np.diff(cuts, prepend=0, append=total)


def corrupt(ids: np.ndarray, removed: np.ndarray, sentinels: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source and target of a text `ids` (time,), given the mask of removed tokens (time,)."""
    return _with_sentinels(ids, removed, sentinels, end), _with_sentinels(ids, ~removed, sentinels, end)


def _with_sentinels(ids: np.ndarray, removed: np.ndarray, sentinels: np.ndarray, end: int) -> np.ndarray:
    """Replace each removed span by the next sentinel, and append the end token."""
    first = removed & ~np.concatenate(([False], removed[:-1]))
    marked = np.where(first, sentinels[np.cumsum(first) - 1], ids)
    return np.append(marked[~removed | first], end)


def sentinel_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of the sentinels, from <extra_id_0> on."""
    found: list[int] = []
    while (number := tokenizer.inner.token_to_id(SENTINEL.format(len(found)))) is not None:
        found.append(number)
    return np.array(found, dtype=np.int64)


def add_sentinels(tokenizer: Tokenizer, count: int) -> Tokenizer:
    """Return the tokenizer with `count` sentinels added, unless it has some."""
    if len(sentinel_ids(tokenizer)):
        return tokenizer
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    strip = Pieces(tokenizer).spaced  # the space before a removed span goes with it
    names = [SENTINEL.format(i) for i in range(count)]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False, lstrip=strip) for name in names])
    return Tokenizer(inner)


class Corrupter:
    """Makes the source and target of a window of text. What is removed depends only on the seeds."""

    def __init__(self, noise: SpanNoise, tokenizer: Tokenizer, context: int):
        self.noise, self.tokenizer, self.sentinels = noise, tokenizer, sentinel_ids(tokenizer)
        if not len(self.sentinels):
            raise UserError(f"this tokenizer has no sentinels ({SENTINEL.format(0)}, ...): train a new one")
        spans = noise.counts(context)[1]
        if spans > len(self.sentinels):
            raise UserError(
                f"{context} tokens have {spans} removed spans, and the tokenizer only {len(self.sentinels)} sentinels: "
                "take a shorter train.context_length, or more sentinels (objective.sentinels)"
            )

    def __call__(self, ids: np.ndarray, *seeds: int) -> tuple[np.ndarray, np.ndarray]:
        removed = self.noise.mask(len(ids), np.random.default_rng(seeds))
        return corrupt(ids, removed, self.sentinels, self.tokenizer.end)

    def batch(self, rows: list[tuple[np.ndarray, ...]]) -> Batch:
        return teacher_forced(rows, self.tokenizer.start, self.tokenizer.pad)


class CorruptedWindows(WindowBatches):
    """Batches of windows of one long text, with a new offset and other removed spans in each epoch."""

    def __init__(self, stream: np.ndarray, context: int, rows: int, seed: int, corrupter: Corrupter):
        super().__init__(stream, context, rows, seed)
        self.corrupter = corrupter

    def epoch(self, number: int) -> list[np.ndarray]:
        """Return the epoch and the start of each row, (rows, 2) per batch."""
        return [np.stack((np.full_like(starts, number), starts), 1) for starts in super().epoch(number)]

    def make(self, numbers: np.ndarray) -> Batch:
        windows = ((self.stream[at : at + self.context], epoch, at) for epoch, at in numbers.tolist())
        return self.corrupter.batch([self.corrupter(ids, self.seed, epoch, at) for ids, epoch, at in windows])


def corrupted_batches(text: np.ndarray, context: int, rows: int, corrupter: Corrupter) -> Iterator[Batch]:
    """Yield a whole text (time,) in batches, with the same spans removed every time. A single last token is dropped."""
    begins = [at for at in range(0, len(text), context) if len(text) - at > 1]
    for first in range(0, len(begins), rows):
        some = begins[first : first + rows]
        yield corrupter.batch([corrupter(text[at : at + context], 0, at) for at in some])
