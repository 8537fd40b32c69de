"""Batches for permutation language modeling: in each segment most tokens are given, and the last few of a random order
are predicted one after the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard.core import Pattern, UserError, find

from .batches import Batch
from .streams import StreamBatches


class PermutedBatches:
    """Batches of segments with random orders.

    streams: the text; every batch continues where the previous one ended.
    every:   one token in this many is predicted.
    seed:    of the orders, which differ in every epoch.
    """

    def __init__(self, streams: StreamBatches, every: int, seed: int):
        if every < 2:
            raise UserError(f"objective.every must be at least 2, so that there is some context, not {every}")
        if streams.context < 2:
            raise UserError("a segment of one token has no context: train.context_length must be at least 2")
        self.streams, self.every, self.seed = streams, every, seed

    def epoch(self, number: int) -> list[np.ndarray]:
        return [np.array([number, *numbers]) for numbers in self.streams.epoch(number) if numbers[1] > 1]

    def make(self, numbers: np.ndarray) -> Batch:
        epoch, place = int(numbers[0]), int(numbers[1])
        tokens = self.streams.make(numbers[1:]).tokens
        batch, size = tokens.shape
        asked = max(size // self.every, 1)
        orders = np.random.default_rng((self.seed, epoch, place)).random((batch, size)).argsort(1)
        ranks = torch.from_numpy(np.maximum(orders - (size - asked) + 1, 0))
        at = target_positions(ranks)
        targets = tokens.gather(1, at)
        pattern = find(Pattern, "order")(ranks, place)  # type: ignore[call-arg]
        return Batch(tokens, targets, count=targets.numel(), pattern=pattern, stream_offset=place)


def target_positions(ranks: Tensor) -> Tensor:
    """Return the positions of the predicted tokens in the order of prediction, (batch, targets), as many in each
    row."""
    return ranks.argsort(1, descending=True)[:, : int((ranks[:1] > 0).sum())].flip(1)
