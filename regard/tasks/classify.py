"""Classify texts: an encoder, or a decoder that predicts at the end of a text, learns from texts with one label each:
sentiment, topic, intent.

regard.load("runs/x").predict(["what a film"])[0][0].text
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from regard.core import Model, UserError
from regard.data import Batches, Corpus, CorpusSplit, LabeledBatches, PreparedDataset, Tokenizer, first_epoch
from regard.data.batches import FIRST_LABEL
from regard.data.columns import HEADER_QUESTION, may_be_header, quoted_list
from regard.data.matched import parse_number
from regard.decode import DecodeConfig
from regard.errors import short
from regard.parts.objectives.classify import Classify
from regard.parts.objectives.objective import Objective

from .dev import Dev, group_references
from .reader import Reader, top_classes
from .run import Prediction
from .task import DEV_TOKENS, Say, Task, Tick, no_progress, say_nothing

FEW = 10  # with fewer examples, nothing can be said about their labels


class TextClassifier(Reader):
    """Predicts the label of a text. target: the tokenizer of the labels."""

    metrics = ("loss", "accuracy", "f1")

    def objective(self) -> Objective:
        return Classify()

    def labels(self, row: Sequence[str]) -> list[str]:
        return [row[-1].strip()]

    def encode_examples(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[np.ndarray, ...]]:
        texts, labels = zip(*rows, strict=True)
        numbers = [np.array([number + FIRST_LABEL]) for number in self.target.label_ids(labels)]
        return list(zip(map(np.array, self.source.encode_with_special_tokens(texts)), numbers, strict=True))

    def batches(self, data: Sequence, budget: int) -> Batches:
        return LabeledBatches(data, budget, 0, self.source.pad, shuffle=False)  # type: ignore[arg-type]

    @torch.no_grad()
    def predict_rows(self, rows: list[list[int]], config: DecodeConfig) -> Iterator[list[Prediction]]:
        """Yield the `config.num_return` most probable labels of each text."""
        for found in top_classes(self.model(*self.padded(rows)), config.num_return):
            names = self.target.tokens(label + FIRST_LABEL for label, _ in found)
            yield [Prediction(name, log, log, [name], True) for name, (_, log) in zip(names, found, strict=True)]


class Labels(Task):
    """The task of classifying texts, and the base of the tasks that label pairs of texts and words.

    always_measured: metrics that are measured without being asked for.
    label_warning:   a warning about the labels to print before training; empty: none.
    """

    objective_name = "classify"
    predictor = TextClassifier
    loss_metrics = ("loss",)
    answer_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "f1")
    always_measured: ClassVar[tuple[str, ...]] = ("accuracy",)
    text_columns: ClassVar[tuple[int, ...]] = (0,)
    label_warning = ""

    def set_metrics(self, names: Sequence[str]) -> None:
        super().set_metrics([*names, *self.always_measured])

    @property
    def default_metric(self) -> str:  # type: ignore[override]
        return self.metrics[0]

    def tokens(self, row: Sequence[str]) -> int:
        return sum(len(self.source.encode_with_special_tokens([row[column]])[0]) for column in self.text_columns)

    def learn_tokenizers(self, corpus: Corpus, tick: Tick) -> None:
        self.source = self.tokenizer(corpus, self.job.tokenizer or self.default_tokenizer, tick, *self.text_columns)
        self.target = self.answer_tokenizer(corpus)

    def inherit_tokenizers(self, source: Tokenizer, target: Tokenizer, corpus: Corpus) -> None:
        self.source = source
        if self.job.task is not None:
            self.target = self.answer_tokenizer(corpus)
            return
        if target is source:
            where = short(self.job.origin or "")
            raise UserError(f"{where} keeps no labels of its own: say --task, to take those of the data")
        self.target = target
        for lines in (corpus.train, corpus.dev):
            if lines is not None:
                self.check_known_labels(lines, target, "among those of the run that this one begins from")

    def answer_tokenizer(self, corpus: Corpus) -> Tokenizer:
        """Return the tokenizer of the answers."""
        self.check_header(corpus)
        return self.label_tokenizer(corpus)

    def label_tokenizer(self, corpus: Corpus) -> Tokenizer:
        """Return the tokenizer of the labels, those of dev and test included, which cannot be learned where the
        training data has none of them."""
        self.check_labels(corpus)
        learned = set(self.labels(corpus.train))
        asked = (self.labels(lines) for lines in (corpus.dev, corpus.test) if lines is not None)
        return Tokenizer.from_labels(learned.union(*asked) if len(learned) > 1 else learned)

    def check_header(self, corpus: Corpus) -> None:
        """Refuse a file whose first line has a label that no other line has, as it may be a header."""
        every = {id(lines.records): lines.records for lines in (corpus.train, corpus.dev, corpus.test) if lines}
        for records in every.values():
            if not records.header_unsure:
                continue
            first, counts = next(iter(records)), Counter(row[-1].strip() for row in records)
            label = first[-1].strip()
            others = Counter({other: count for other, count in counts.items() if other != label})
            if counts[label] > 1 or not others:
                continue
            numbers = parse_number(label) is None and all(parse_number(other) is not None for other in others)
            odd = others.total() >= FEW and min(others.values()) > 1
            if (numbers and others.total() > 1) or odd or may_be_header([label]):
                raise UserError(
                    f"{records.name}: no line but the first has the label {quoted_list([label])}: "
                    f"{quoted_list(first)}, {HEADER_QUESTION}"
                )

    def check_labels(self, corpus: Corpus) -> None:
        """Refuse data with about as many labels as examples, unless the user named the columns."""
        labels, texts = (list({row[column].strip() for row in corpus.train}) for column in (-1, 0))
        examples = corpus.train.count or 0
        if examples < FEW or 2 * len(labels) <= examples:
            return
        pick, turned = corpus.train.records.pick, 4 * len(texts) < len(labels)
        if self.job.columns is not None and not turned:
            self.label_warning = f"warning: there are {len(labels):,} different labels for {examples:,} examples"
            return
        ways = ["take an encoder-decoder to answer texts with texts"]
        if pick is not None and not turned:
            ways = [f"say --columns {','.join(pick.selected)} if they are labels", *ways]
        if pick is not None and len(pick.selected) == 2:
            ways = [f"say --columns {','.join(reversed(pick.selected))} if that is the text", *ways]
        raise UserError(
            f"{corpus.train.name}: there are {len(labels):,} different labels ({quoted_list(sorted(labels)[:3])}, ...) "
            f"for {examples:,} examples of {len(texts):,} texts, so these may be no labels: {', or '.join(ways)}"
        )

    def labels(self, lines: CorpusSplit) -> Iterable[str]:
        """Return all labels of the data."""
        return {row[-1].strip() for row in lines}

    def check_known_labels(self, lines: CorpusSplit, known: Tokenizer, where: str) -> None:
        names = known.inner.get_vocab()
        for label in sorted(self.labels(lines)):
            if label not in names:
                raise UserError(f"{lines.name}: the label '{label}' is not {where}")

    def complete_recipe(self, recipe: dict[str, Any]) -> None:
        recipe["vocab"] = self.source.size
        head = recipe["model"].get("head", "classify")
        recipe["model"]["head"] = ({"part": head} if isinstance(head, str) else head) | {
            "classes": self.target.num_labels
        }

    def objective(self) -> Objective:
        return Classify(self.settings.label_smoothing)

    def make_batches(self, data: PreparedDataset, budget: int, shuffle: bool = True) -> Batches:
        """Return batches of at most `budget` tokens; training batches have at most `batch_size` rows."""
        return LabeledBatches(
            data, budget, self.settings.seed, self.source.pad, shuffle, self.settings.batch_size * shuffle
        )

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        if self.label_warning:
            say(self.label_warning)
        if corpus.dev is not None and self.target is not self.source:
            unknown = sorted(set(self.labels(corpus.dev)) - set(self.labels(corpus.train)))
            if unknown:
                of = f"the label '{unknown[0]}'" + (f" and {len(unknown) - 1} more" if unknown[1:] else "")
                say(f"warning: {corpus.dev.name}: {of} cannot be learned, for the training data has none of that")
        return self.make_batches(
            self.prepare(model, corpus.train, "train.arrow", say, tick), self.settings.batch_tokens
        )

    def dev(self, model: Model, lines: CorpusSplit) -> Dev:
        data = self.prepare(model, lines, "dev.arrow", say_nothing, no_progress)
        batches = self.make_batches(data, max(self.settings.batch_tokens, DEV_TOKENS), shuffle=False)
        return Dev(
            self.objective(),
            lambda: first_epoch(batches),
            self.make_predictor,
            self.loss_metrics,
            self.metrics,
            *group_references(lines, False),
        )
