"""Batches of parallel streams of a long text: each row continues where that of the previous batch ended, so that the
memory that a model keeps of a batch is the context of the next."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from regard.core import UserError

from .batches import IGNORE, Batch, pad_rows


class StreamBatches:
    """Batches of `rows` streams, cut into consecutive segments of `context` tokens at a new offset in every epoch. The
    last segment of an epoch may be shorter."""

    def __init__(self, text: np.ndarray, context: int, rows: int, seed: int):
        if len(text) < context + 1:
            raise UserError(f"a text of {len(text)} tokens is too short for a context of {context}")
        self.text, self.context, self.seed = text, context, seed
        self.rows = min(rows, max((len(text) - 1) // context, 1))

    def epoch(self, number: int) -> list[np.ndarray]:
        """Return for each batch its offset in the streams, its length, and where in the text its rows begin."""
        rng = np.random.default_rng((self.seed, number))
        slack = min(self.context, len(self.text) - 1 - self.rows * self.context)
        offset = int(rng.integers(slack)) if slack > 0 else 0
        length = (len(self.text) - 1 - offset) // self.rows
        begins = offset + length * np.arange(self.rows)
        places = range(0, length, self.context)
        return [np.array([at, min(self.context, length - at), *(begins + at)]) for at in places]

    def make(self, numbers: np.ndarray) -> Batch:
        place, size, *begins = (int(number) for number in numbers)
        read = torch.from_numpy(np.stack([self.text[at : at + size + 1] for at in begins]).astype(np.int64))
        tokens, targets = read[:, :-1].contiguous(), read[:, 1:].contiguous()
        return Batch(tokens, targets, count=targets.numel(), stream_offset=place)


def eval_streams(text: np.ndarray, before: int, context: int, rows: int, pad: int) -> Iterator[Batch]:
    """Yield all of a text (time,) as streams in which every token is a target exactly once. before: the token that
    precedes the first. There are fewer rows where each would have less than eight segments."""
    rows = max(1, min(rows, len(text) // (8 * context)))
    begins = [len(text) * row // rows for row in range(rows + 1)]
    longest = max(np.diff(begins))
    for place in range(0, int(longest), context):
        ends = [(begin + place, min(begin + place + context, end)) for begin, end in pairwise(begins)]
        targets, valid = pad_rows([text[at:end] for at, end in ends], IGNORE)
        read = [np.append(text[at - 1] if at else before, text[at : end - 1])[: end - at] for at, end in ends]
        tokens, _ = pad_rows(read, pad)
        tokens = tokens[:, : targets.shape[1]]
        yield Batch(tokens, targets, None if bool(valid.all()) else valid, count=int(valid.sum()), stream_offset=place)
