"""Two texts and a label, or a number: an encoder, or a decoder that is asked at the end of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from regard.core import Model, UserError
from regard.data import Batches, Corpus, Lines, Sequences, Tokenizer
from regard.data.matched import MatchCoder, Matched, labels_in, number, numbers_in, types_of
from regard.parts.objectives.objective import Objective
from regard.parts.objectives.rate import Rate
from regard.train.dev import Dev
from regard.use.match import Matcher

from .labels import Labels
from .task import Say, Tick

MANY = 10  # different whole numbers that may still be labels
OF_NUMBERS, OF_LABELS = ("pearson", "spearman"), ("accuracy", "f1")


class Matches(Labels):
    """Answers are numbers where all of them are, and some are not whole, they are many, or a metric of numbers is
    asked for."""

    reads = "matches"
    answered = (*OF_LABELS, *OF_NUMBERS)
    always = ()
    texts = (0, 1)

    @property
    def rates(self) -> bool:
        """Answers are numbers, and there is no tokenizer for them."""
        return self.target is self.source

    @property
    def decisive(self) -> str:  # type: ignore[override]
        return self.metrics[0] if self.metrics else "spearman" if self.rates else "accuracy"

    def inherit(self, source: Tokenizer, target: Tokenizer, corpus: Corpus) -> None:
        if self.job.task is None and target is source:
            self.source = self.target = source
            for lines in (corpus.train, corpus.dev):
                _numbers(lines)
        else:
            super().inherit(source, target, corpus)

    def answers(self, corpus: Corpus) -> Tokenizer:
        self.check_header(corpus)
        return self.source if self._wants_numbers(corpus) else self.numbered(corpus)

    def _wants_numbers(self, corpus: Corpus) -> bool:
        values = [number(row[2]) for row in corpus.train]
        if any(name in OF_NUMBERS for name in self.metrics):
            _numbers(corpus.train)
        elif any(value is None for value in values) or any(name in OF_LABELS for name in self.metrics):
            return False
        few = len(set(values)) <= MANY and all(float(value).is_integer() for value in values if value is not None)
        if few and not self.metrics:
            return False
        _numbers(corpus.dev)
        return True

    def complete(self, recipe: dict[str, Any]) -> None:
        super().complete(recipe)
        if self.rates:
            head = recipe["model"]["head"]
            if head["part"] == "compare":  # which tells a number where it has no classes
                del head["classes"]
            else:
                recipe["model"]["head"] = {"part": "regress"} | {k: head[k] for k in ("pool", "dropout") if k in head}

    def objective(self) -> Objective:
        return Rate() if self.rates else super().objective()

    def coder(self, model: Model) -> MatchCoder:
        return MatchCoder(self.source, None if self.rates else self.target, types_of(model))

    def sized(self, data: Sequences, budget: int, shuffle: bool = True) -> Batches:
        s, read = self.settings, numbers_in if self.rates else labels_in
        return Matched(data, budget, s.seed, read, self.source.pad, shuffle, s.batch_size * shuffle)  # type: ignore[return-value]

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        if self.rates and (self.job.task or not self.job.origin):
            values = torch.tensor([number(row[2]) for row in corpus.train], dtype=torch.float64)
            if not self.metrics:
                say(
                    f"{len(values.unique())} different numbers are learned as numbers; as labels, say --metric accuracy"
                )
            with torch.no_grad():
                model.head.out.bias.fill_(values.mean())  # type: ignore[union-attr]
        return super().batches(model, corpus, say, tick)

    def dev(self, model: Model, lines: Lines) -> Dev:
        right = OF_NUMBERS if self.rates else OF_LABELS
        wrong = [name for name in self.metrics if name not in right]
        if wrong:
            raise UserError(f"'{wrong[0]}' is not for {'numbers' if self.rates else 'labels'}: say {right[0]}")
        self.metrics = self.metrics or [self.decisive]
        return super().dev(model, lines)

    def run(self, model: Model, folder: Path | None, documents: bool) -> Matcher:
        return Matcher(model, self.source, self.target, folder)


def _numbers(lines: Lines | None) -> None:
    """Refuse what is none."""
    for row in lines or ():
        if number(row[2]) is None:
            raise UserError(f"{lines.name}: numbers are wanted here, and '{row[2]}' is none")  # type: ignore[union-attr]
