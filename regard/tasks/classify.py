"""Label texts: an encoder, or a decoder that is asked at the end of a text, learns from texts with a label each:
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
from regard.data import Batches, Corpus, LabeledBatches, Lines, Sequences, Tokenizer, once
from regard.data.batches import FIRST_LABEL
from regard.data.columns import ASK, listed, may_be_header
from regard.data.matched import number
from regard.decode import DecodeConfig
from regard.errors import short
from regard.parts.objectives.classify import Classify
from regard.parts.objectives.objective import Objective

from .dev import Dev, gather
from .reader import Reader, ranked
from .run import Prediction
from .task import DEV_TOKENS, Say, Task, Tick, silent, unseen

FEW = 10  # examples, of which nothing can be told about their labels


class TextClassifier(Reader):
    """target: the tokenizer of the labels."""

    metrics = ("loss", "accuracy", "f1")

    def objective(self) -> Objective:
        return Classify()

    def labels(self, row: Sequence[str]) -> list[str]:
        return [row[-1].strip()]

    def coded(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[np.ndarray, ...]]:
        texts, labels = zip(*rows, strict=True)
        numbers = [np.array([number + FIRST_LABEL]) for number in self.target.numbers(labels)]
        return list(zip(map(np.array, self.source.frame(texts)), numbers, strict=True))

    def batches(self, data: Sequence, budget: int) -> Batches:
        return LabeledBatches(data, budget, 0, self.source.pad, shuffle=False)  # type: ignore[arg-type]

    @torch.no_grad()
    def respond(self, rows: list[list[int]], config: DecodeConfig) -> Iterator[list[Prediction]]:
        """The `config.num_return` most probable labels of each text."""
        for found in ranked(self.model(*self.padded(rows)), config.num_return):
            names = self.target.tokens(label + FIRST_LABEL for label, _ in found)
            yield [Prediction(name, log, log, [name], True) for name, (_, log) in zip(names, found, strict=True)]


class Labels(Task):
    """What is answered in labels; those of pairs of texts and of words differ in a few places.

    always: metrics that are measured without being asked for.
    doubt:  what should be told about the labels before anything is learned; empty: nothing.
    """

    learns = "classify"
    predictor = TextClassifier
    forced = ("loss",)
    answered: ClassVar[tuple[str, ...]] = ("accuracy", "f1")
    always: ClassVar[tuple[str, ...]] = ("accuracy",)
    texts: ClassVar[tuple[int, ...]] = (0,)
    doubt = ""

    def ask(self, names: Sequence[str]) -> None:
        super().ask([*names, *self.always])

    @property
    def decisive(self) -> str:  # type: ignore[override]
        return self.metrics[0]

    def tokens(self, row: Sequence[str]) -> int:
        return sum(len(self.source.frame([row[column]])[0]) for column in self.texts)

    def learn(self, corpus: Corpus, tick: Tick) -> None:
        self.source = self.tokenizer(corpus, self.job.tokenizer or self.usual, tick, *self.texts)
        self.target = self.answers(corpus)

    def inherit(self, source: Tokenizer, target: Tokenizer, corpus: Corpus) -> None:
        self.source = source
        if self.job.task is not None:
            self.target = self.answers(corpus)
            return
        if target is source:
            where = short(self.job.origin or "")
            raise UserError(f"{where} keeps no labels of its own: say --task, to take those of the data")
        self.target = target
        for lines in (corpus.train, corpus.dev):
            if lines is not None:
                self.check(lines, target, "among those of the run that this one begins from")

    def answers(self, corpus: Corpus) -> Tokenizer:
        """Return the labels of the data, numbered."""
        self.check_header(corpus)
        return self.numbered(corpus)

    def numbered(self, corpus: Corpus) -> Tokenizer:
        """Return the labels with their numbers: those of dev and test, too, which can be asked for but not be learned
        where the training data has none of them."""
        self.check_labels(corpus)
        learned = set(self.labels(corpus.train))
        asked = (self.labels(lines) for lines in (corpus.dev, corpus.test) if lines is not None)
        return Tokenizer.from_labels(learned.union(*asked) if len(learned) > 1 else learned)

    def check_header(self, corpus: Corpus) -> None:
        """Refuse a file whose first line has a label that no other line has, and that may thus be a header."""
        every = {id(lines.records): lines.records for lines in (corpus.train, corpus.dev, corpus.test) if lines}
        for records in every.values():
            if not records.unsure:
                continue
            first, counts = next(iter(records)), Counter(row[-1].strip() for row in records)
            label = first[-1].strip()
            others = Counter({other: count for other, count in counts.items() if other != label})
            if counts[label] > 1 or not others:
                continue
            numbers = number(label) is None and all(number(other) is not None for other in others)
            odd = others.total() >= FEW and min(others.values()) > 1
            if (numbers and others.total() > 1) or odd or may_be_header([label]):
                raise UserError(
                    f"{records.name}: no line but the first has the label {listed([label])}: {listed(first)}, {ASK}"
                )

    def check_labels(self, corpus: Corpus) -> None:
        """Refuse data with about as many labels as examples, unless the columns were named and may well be right."""
        labels, texts = (list({row[column].strip() for row in corpus.train}) for column in (-1, 0))
        examples = corpus.train.count or 0
        if examples < FEW or 2 * len(labels) <= examples:
            return
        pick, turned = corpus.train.records.pick, 4 * len(texts) < len(labels)
        if self.job.columns is not None and not turned:
            self.doubt = f"warning: there are {len(labels):,} different labels for {examples:,} examples"
            return
        ways = ["take an encoder-decoder to answer texts with texts"]
        if pick is not None and not turned:
            ways = [f"say --columns {','.join(pick.taken)} if they are labels", *ways]
        if pick is not None and len(pick.taken) == 2:
            ways = [f"say --columns {','.join(reversed(pick.taken))} if the text stands there", *ways]
        raise UserError(
            f"{corpus.train.name}: there are {len(labels):,} different labels ({listed(sorted(labels)[:3])}, ...) for "
            f"{examples:,} examples of {len(texts):,} texts, so these may be no labels: {', or '.join(ways)}"
        )

    def labels(self, lines: Lines) -> Iterable[str]:
        """All that stand there."""
        return {row[-1].strip() for row in lines}

    def check(self, lines: Lines, known: Tokenizer, where: str) -> None:
        names = known.inner.get_vocab()
        for label in sorted(self.labels(lines)):
            if label not in names:
                raise UserError(f"{lines.name}: the label '{label}' stands nowhere {where}")

    def complete(self, recipe: dict[str, Any]) -> None:
        recipe["vocab"] = self.source.size
        head = recipe["model"].get("head", "classify")
        recipe["model"]["head"] = ({"part": head} if isinstance(head, str) else head) | {"classes": self.target.labels}

    def objective(self) -> Objective:
        return Classify(self.settings.label_smoothing)

    def sized(self, data: Sequences, budget: int, shuffle: bool = True) -> Batches:
        """Batches of at most so many tokens; of those to learn from, no more rows than the settings say."""
        return LabeledBatches(
            data, budget, self.settings.seed, self.source.pad, shuffle, self.settings.batch_size * shuffle
        )

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        if self.doubt:
            say(self.doubt)
        if corpus.dev is not None and self.target is not self.source:
            unknown = sorted(set(self.labels(corpus.dev)) - set(self.labels(corpus.train)))
            if unknown:
                of = f"the label '{unknown[0]}'" + (f" and {len(unknown) - 1} more" if unknown[1:] else "")
                say(f"warning: {corpus.dev.name}: {of} cannot be learned, for the training data has none of that")
        return self.sized(self.prepare(model, corpus.train, "train.arrow", say, tick), self.settings.batch_tokens)

    def dev(self, model: Model, lines: Lines) -> Dev:
        data = self.prepare(model, lines, "dev.arrow", silent, unseen)
        batches = self.sized(data, max(self.settings.batch_tokens, DEV_TOKENS), shuffle=False)
        return Dev(self.objective(), lambda: once(batches), self.run, self.forced, self.metrics, *gather(lines, False))
