"""Tag words: an encoder learns from sentences whose words have one tag each: named entities, parts of speech, slots.

regard.load("runs/x").predict(["EU rejects German call"])[0][0].text     # EU/B-ORG rejects/O German/B-MISC call/O
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch

from regard.core import Model
from regard.data import Batches, Corpus, CorpusSplit, PreparedDataset
from regard.data.batches import FIRST_LABEL, IGNORE
from regard.data.conll import TAG_SEPARATOR, TagBatches, TagCoder, first_tokens_of_words
from regard.decode import DecodeConfig
from regard.metrics import spans
from regard.parts.objectives.nodes import Nodes
from regard.parts.objectives.objective import Objective

from .classify import Labels
from .reader import Reader, check_lengths, truncated
from .run import MAX_SOURCE_TOKENS, Prediction

NONE = "?"  # the tag of a word that was truncated or has no token


class Words(list[int]):
    """The token ids of a sentence, its words, and the index of the first token of each."""

    def __init__(self, ids: list[int], words: list[str], firsts: list[int]):
        super().__init__(ids)
        self.words, self.firsts = words, firsts


class Tagger(Reader):
    """Predicts the tag of every word of a sentence, given with spaces between words. target: the tokenizer of the
    tags."""

    reads = "tags"
    options = ("truncate",)

    @property
    def metrics(self) -> Sequence[str]:  # type: ignore[override]
        """Return the metrics; span_f1 where some tag belongs to a span, as B-PER does."""
        names = self.target.inner.get_vocab()
        return ("loss", "tag_accuracy", *(["span_f1"] if any(spans([name]) for name in names) else []))

    @cached_property
    def coder(self) -> TagCoder:
        return TagCoder(self.source, self.target, unknown=IGNORE)

    def labels(self, row: Sequence[str]) -> list[str]:
        return row[1].split(" ")

    def objective(self) -> Objective:
        return Nodes()

    def encode_examples(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[np.ndarray, ...]]:
        return [tuple(map(np.array, row)) for row in zip(*self.coder(rows), strict=True)]

    def batches(self, data: Sequence, budget: int) -> Batches:
        return TagBatches(data, budget, 0, self.source.pad, shuffle=False)  # type: ignore

    def encode_inputs(
        self, texts: list[str], config: DecodeConfig, lines_before: int = 0
    ) -> tuple[list[list[int]], list[bool]]:
        limit = min(config.max_source_tokens or MAX_SOURCE_TOKENS, self.limit or MAX_SOURCE_TOKENS)
        words = [text.split() for text in texts]
        found = first_tokens_of_words(self.source, [" ".join(some) for some in words])
        cut = check_lengths([len(ids) for ids, _ in found], limit, config, lines_before)
        rows: list[list[int]] = []
        for some, (ids, firsts), long in zip(words, found, cut, strict=True):
            kept = [first if first < limit - 1 else -1 for first in firsts] if long else firsts
            rows.append(Words(truncated(ids, limit), some, kept))
        return rows, cut

    @torch.no_grad()
    def predict_rows(self, rows: list[list[int]], config: DecodeConfig) -> Iterator[list[Prediction]]:
        """Yield for each sentence the most likely tag of every word."""
        scores = self.model(*self.padded(rows)).float().log_softmax(-1)
        values, classes = scores.max(-1)
        for row, logs, numbers in zip(rows, values.tolist(), classes.tolist(), strict=True):
            assert isinstance(row, Words)
            read = [first for first in row.firsts if first >= 0]
            names = iter(self.target.tokens(numbers[first] + FIRST_LABEL for first in read))
            tags = [next(names) if first >= 0 else NONE for first in row.firsts]
            text = " ".join(f"{word}{TAG_SEPARATOR}{tag}" for word, tag in zip(row.words, tags, strict=True))
            log = sum(logs[first] for first in read)
            yield [Prediction(text, log, log, tags, True)]


class Tags(Labels):
    objective_name = "tag"
    predictor = Tagger
    reads = "tags"
    answer_metrics = ("tag_accuracy", "span_f1")
    always_measured = ("tag_accuracy",)

    def check_header(self, corpus: Corpus) -> None:
        """Do nothing: CoNLL has no header, and a header of a table would not have as many tags as words."""

    def check_labels(self, corpus: Corpus) -> None:
        """Do nothing: an example has many tags."""

    def labels(self, lines: CorpusSplit) -> Iterable[str]:
        return {tag for _, tags in lines for tag in tags.split(" ")}

    def objective(self) -> Objective:
        return Nodes(self.settings.label_smoothing)

    def coder(self, model: Model) -> TagCoder:
        return TagCoder(self.source, self.target)

    def make_batches(self, data: PreparedDataset, budget: int, shuffle: bool = True) -> Batches:
        s = self.settings
        return TagBatches(data, budget, s.seed, self.source.pad, shuffle, s.batch_size * shuffle)  # type: ignore[return-value]
