"""Encode and batch pairs of texts with a label (entailment) or a number (similarity).

[CLS] a [SEP] b [SEP] is read as one sequence, each token with the segment id of its text, as in Devlin et al. 2019,
arXiv:1810.04805.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.core import Model, UserError

from .batches import Batch, BucketedBatches, SequenceDataset, pad_rows
from .tokenizer import Tokenizer

DecodeAnswers = Callable[[Sequence[np.ndarray]], Tensor]


class MatchCoder:
    """Encodes records as token ids, the answer, and the segment id of each token.

    labels: the tokenizer of the labels; None: answers are numbers, stored as the bits of a float32.
    types:  the number of segment ids that the model has; None: any.
    """

    names = ("source", "target", "segments")

    def __init__(self, source: Tokenizer, labels: Tokenizer | None, types: int | None):
        self.source, self.labels, self.types = source, labels, types

    def __call__(self, rows: Sequence[tuple[str, ...]]) -> list[list[list[int]]]:
        framed = self.encode_pairs([(row[0], row[1]) for row in rows])
        answers = [row[2] for row in rows]
        coded = self.labels.label_ids(answers) if self.labels else map(float_bits, answers)
        return [[ids for ids, _ in framed], [[one] for one in coded], [segments for _, segments in framed]]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], limit: int | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Return the token ids and segment ids of each pair. limit: the most tokens; the longer text is truncated
        first, then both."""
        framed = self.source.encode_pairs(pairs)
        if limit is not None:
            for number, (ids, _) in enumerate(framed):
                if len(ids) > limit:
                    framed[number] = self._shortened(pairs[number], len(ids), limit)
        if self.types is None:
            return framed
        return [(ids, [min(one, self.types - 1) for one in segments]) for ids, segments in framed]

    def _shortened(self, pair: tuple[str, str], length: int, limit: int) -> tuple[list[int], list[int]]:
        inner = self.source.inner
        one, two = (inner.encode(text, add_special_tokens=False) for text in pair)
        left = max(limit - (length - len(one) - len(two)), 0)  # besides the special tokens
        first = max(left - len(two), min(len(one), left // 2))
        one.truncate(first)
        two.truncate(left - len(one))
        if self.source.adds_special_tokens:
            both = inner.post_process(one, two, add_special_tokens=True)
            return both.ids, both.type_ids
        ids = [[*text.ids, self.source.end] for text in (one, two)]
        return [*ids[0], *ids[1]], [0] * len(ids[0]) + [1] * len(ids[1])

    def key(self) -> list[Any]:
        return ["matched", self.labels is None, self.types]


def num_segment_types(model: Model) -> int | None:
    """Return the number of segment ids of a model, if its embedding has a table of them."""
    table = getattr(model.embed, "segment_table", None)
    return None if table is None else len(table)


def parse_number(text: str) -> float | None:
    """Return a text as a finite number; None: it is not one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def float_bits(text: str) -> int:
    """Return the bits of a number as a float32."""
    value = parse_number(text)
    if value is None:
        raise UserError(f"'{text}' is no number, and numbers were learned")
    return int(np.float32(value).view(np.int32))


def decode_labels(answers: Sequence[np.ndarray]) -> Tensor:
    return torch.tensor([int(answer[0]) for answer in answers])


def decode_numbers(answers: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.array([answer[0] for answer in answers], np.int32).view(np.float32))


class MatchBatches:
    """Batches of pairs of texts: `targets` is (batch,), labels or numbers.

    answers: decode_labels or decode_numbers.
    """

    def __init__(
        self,
        data: SequenceDataset,
        budget: int,
        seed: int,
        answers: DecodeAnswers,
        pad: int = 0,
        shuffle: bool = True,
        rows: int = 0,
    ):
        self.inner, self.answers = BucketedBatches(data, budget, seed, 0, pad, shuffle, rows), answers

    def epoch(self, number: int) -> list[np.ndarray]:
        return self.inner.epoch(number)

    def make(self, numbers: np.ndarray) -> Batch:
        rows = [self.inner.data[int(number)] for number in numbers]
        tokens, valid = pad_rows([row[0] for row in rows], self.inner.pad)
        segments, _ = pad_rows([row[2] for row in rows], 0)
        targets = self.answers([row[1] for row in rows])
        return Batch(tokens, targets, None if bool(valid.all()) else valid, count=len(rows), segments=segments)
