"""Which target token goes with which source token, learned from pairs without word order (IBM model 1):

    t(y | x) = normalized sum over pairs of   t(y | x) / sum over source tokens x' of the pair of t(y | x')

An alignment also prefers the diagonal, as fast_align does: Dyer et al. 2013. Brown et al. 1993, "The Mathematics of
Statistical Machine Translation".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from regard.core import UserError

MAX_PAIRS = 300_000  # to learn from
ROUNDS = 5
MAX_TOKENS = 100  # of a text that are used: longer texts say little about which words belong together
DIAGONAL = 4.0  # how much the relative distance from the diagonal costs, as a log-probability


class TranslationTable:
    """t(y | x) of the pairs of tokens that occur together, in the order of x, then y."""

    def __init__(self, source: np.ndarray, target: np.ndarray, share: np.ndarray, vocab: int):
        self.source, self.target, self.share, self.vocab = source, target, share, vocab
        self.keys = source * vocab + target

    @classmethod
    def learn(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], vocab: tuple[int, int]) -> TranslationTable:
        """Learn the table from pairs of token lists. vocab: sizes of the source and the target vocabulary."""
        sources, targets, places, place = [], [], [], 0
        for source, target in islice(pairs, MAX_PAIRS):
            xs, ys = np.unique(source)[:MAX_TOKENS], np.unique(target)[:MAX_TOKENS]
            if not len(xs) or not len(ys):
                continue
            sources.append(np.tile(xs, len(ys)))
            targets.append(np.repeat(ys, len(xs)))
            places.append(np.repeat(np.arange(place, place + len(ys)), len(xs)))
            place += len(ys)
        if not place:
            raise UserError("there are no pairs to learn from which words belong together")
        keys, link = np.unique(
            np.concatenate(sources).astype(np.int64) * vocab[1] + np.concatenate(targets), return_inverse=True
        )
        seat = np.concatenate(places)
        x, y = keys // vocab[1], keys % vocab[1]
        share = np.ones(len(keys))
        for _ in range(ROUNDS):
            weights = share[link]
            counts = np.bincount(link, weights / np.bincount(seat, weights, place)[seat], len(keys))
            share = counts / np.bincount(x, counts, vocab[0])[x]
        return cls(x, y, share, vocab[1])

    def align(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return for each target token the source position that it goes with. The last of both are end tokens, and go
        together."""
        wanted = np.asarray(source, dtype=np.int64)[None] * self.vocab + np.asarray(target, dtype=np.int64)[:, None]
        at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        share = np.where(self.keys[at] == wanted, self.share[at], 0.0)
        rows, columns = (np.arange(n) / max(n - 1, 1) for n in wanted.shape)
        near = np.exp(-DIAGONAL * np.abs(rows[:, None] - columns))
        found = ((share + 1e-9) * near).argmax(1)
        found[-1] = len(source) - 1
        return found

    def fertilities(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return how many target tokens go with each source token; together they are all of them."""
        return np.bincount(self.align(source, target), minlength=len(source))
