"""Classify or rate pairs of texts: predict a label (entailment) or a number (similarity). The model is an encoder, or a
decoder that predicts at the end of both.

regard.load("runs/x").predict([("a man sleeps", "somebody is awake")])[0][0].text
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from regard.core import Model, UserError
from regard.data import Batches, Corpus, CorpusSplit, PreparedDataset, Tokenizer
from regard.data.batches import FIRST_LABEL, pad_rows
from regard.data.matched import MatchBatches, MatchCoder, decode_labels, decode_numbers, num_segment_types, parse_number
from regard.decode import DecodeConfig
from regard.parts.objectives.classify import Classify
from regard.parts.objectives.objective import Objective
from regard.parts.objectives.rate import Rate

from .classify import Labels
from .dev import Dev
from .reader import Reader, check_lengths, top_classes
from .run import MAX_SOURCE_TOKENS, Prediction
from .task import Say, Tick

MANY = 10  # up to this many different integers are taken as labels
OF_NUMBERS, OF_LABELS = ("pearson", "spearman"), ("accuracy", "f1")


class Pair(list[int]):
    """The token ids of two texts, and the segment id of each token."""

    def __init__(self, ids: list[int], segments: list[int]):
        super().__init__(ids)
        self.segments = segments


class Matcher(Reader):
    """Predicts the label or number of a pair of texts, given as a tuple or with a tab between.

    target: the tokenizer of the labels; unused where answers are numbers.
    """

    reads = "matches"

    @property
    def rates(self) -> bool:
        """Return whether answers are numbers."""
        return getattr(self.model.head, "classes", None) is None

    @property
    def metrics(self) -> Sequence[str]:  # type: ignore[override]
        return ("loss", "pearson", "spearman") if self.rates else ("loss", "accuracy", "f1")

    @cached_property
    def coder(self) -> MatchCoder:
        return MatchCoder(self.source, None if self.rates else self.target, num_segment_types(self.model))

    def objective(self) -> Objective:
        return Rate() if self.rates else Classify()

    def labels(self, row: Sequence[str]) -> list[str]:
        return [] if self.rates else [row[-1].strip()]

    def encode_examples(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[np.ndarray, ...]]:
        return [tuple(map(np.array, row)) for row in zip(*self.coder(rows), strict=True)]

    def batches(self, data: Sequence, budget: int) -> Batches:
        read = decode_numbers if self.rates else decode_labels
        return MatchBatches(data, budget, 0, read, self.source.pad, shuffle=False)  # type: ignore

    def encode_inputs(
        self, texts: list[str], config: DecodeConfig, lines_before: int = 0
    ) -> tuple[list[list[int]], list[bool]]:
        limit = min(config.max_source_tokens or MAX_SOURCE_TOKENS, self.limit or MAX_SOURCE_TOKENS)
        pairs = [_split_pair(text, number) for number, text in enumerate(texts, lines_before + 1)]
        rows = self.coder.encode_pairs(pairs)
        cut = check_lengths([len(ids) for ids, _ in rows], limit, config, lines_before)
        rows = self.coder.encode_pairs(pairs, limit) if any(cut) else rows
        return [Pair(*row) for row in rows], cut

    @torch.no_grad()
    def predict_rows(self, rows: list[list[int]], config: DecodeConfig) -> Iterator[list[Prediction]]:
        """Yield the `config.num_return` most probable labels of each pair, or its number."""
        segments, _ = pad_rows([row.segments for row in rows], 0)  # type: ignore
        scores = self.model(*self.padded(rows), segments=segments.to(self.device))
        if self.rates:
            for value in scores[:, 0].tolist():
                yield [Prediction(f"{value:.4f}", value, 0.0, [], True)]
            return
        for found in top_classes(scores, config.num_return):
            names = self.target.tokens(label + FIRST_LABEL for label, _ in found)
            yield [Prediction(name, log, log, [name], True) for name, (_, log) in zip(names, found, strict=True)]


def _split_pair(text: str | Sequence[str], number: int) -> tuple[str, str]:
    sides = text.split("\t") if isinstance(text, str) else list(text)
    if len(sides) != 2:
        raise UserError(f"line {number} should be two texts with a tab between, and has {len(sides)}")
    return sides[0], sides[1]


class Matches(Labels):
    """The task of classifying or rating pairs of texts. Answers are learned as numbers if all of them are, and some are
    not integers, or more than MANY differ, or a metric of numbers is asked for."""

    objective_name = "match"
    predictor = Matcher
    reads = "matches"
    answer_metrics = (*OF_LABELS, *OF_NUMBERS)
    always_measured = ()
    text_columns = (0, 1)

    @property
    def rates(self) -> bool:
        """Return whether answers are numbers, which have no tokenizer."""
        return self.target is self.source

    @property
    def default_metric(self) -> str:  # type: ignore[override]
        return self.metrics[0] if self.metrics else "spearman" if self.rates else "accuracy"

    def inherit_tokenizers(self, source: Tokenizer, target: Tokenizer, corpus: Corpus) -> None:
        if self.job.task is None and target is source:
            self.source = self.target = source
            for lines in (corpus.train, corpus.dev):
                _check_numbers(lines)
        else:
            super().inherit_tokenizers(source, target, corpus)

    def answer_tokenizer(self, corpus: Corpus) -> Tokenizer:
        self.check_header(corpus)
        return self.source if self._wants_numbers(corpus) else self.label_tokenizer(corpus)

    def _wants_numbers(self, corpus: Corpus) -> bool:
        values = [parse_number(row[2]) for row in corpus.train]
        if any(name in OF_NUMBERS for name in self.metrics):
            _check_numbers(corpus.train)
        elif any(value is None for value in values) or any(name in OF_LABELS for name in self.metrics):
            return False
        few = len(set(values)) <= MANY and all(float(value).is_integer() for value in values if value is not None)
        if few and not self.metrics:
            return False
        _check_numbers(corpus.dev)
        return True

    def complete_recipe(self, recipe: dict[str, Any]) -> None:
        super().complete_recipe(recipe)
        if self.rates:
            head = recipe["model"]["head"]
            if head["part"] == "compare":  # it predicts a number where it has no classes
                del head["classes"]
            else:
                recipe["model"]["head"] = {"part": "regress"} | {k: head[k] for k in ("pool", "dropout") if k in head}

    def objective(self) -> Objective:
        return Rate() if self.rates else super().objective()

    def coder(self, model: Model) -> MatchCoder:
        return MatchCoder(self.source, None if self.rates else self.target, num_segment_types(model))

    def make_batches(self, data: PreparedDataset, budget: int, shuffle: bool = True) -> Batches:
        s, read = self.settings, decode_numbers if self.rates else decode_labels
        return MatchBatches(data, budget, s.seed, read, self.source.pad, shuffle, s.batch_size * shuffle)  # type: ignore[return-value]

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        if self.rates and (self.job.task or not self.job.origin):
            values = torch.tensor([parse_number(row[2]) for row in corpus.train], dtype=torch.float64)
            if not self.metrics:
                say(
                    f"{len(values.unique())} different numbers are learned as numbers; as labels, say --metric accuracy"
                )
            with torch.no_grad():
                model.head.out.bias.fill_(values.mean())  # type: ignore[union-attr]
        return super().batches(model, corpus, say, tick)

    def dev(self, model: Model, lines: CorpusSplit) -> Dev:
        right = OF_NUMBERS if self.rates else OF_LABELS
        wrong = [name for name in self.metrics if name not in right]
        if wrong:
            raise UserError(f"'{wrong[0]}' is not for {'numbers' if self.rates else 'labels'}: say {right[0]}")
        self.metrics = self.metrics or [self.default_metric]
        return super().dev(model, lines)


def _check_numbers(lines: CorpusSplit | None) -> None:
    """Refuse data with answers that are not numbers."""
    for row in lines or ():
        if parse_number(row[2]) is None:
            raise UserError(f"{lines.name}: numbers are wanted here, and '{row[2]}' is none")  # type: ignore[union-attr]
