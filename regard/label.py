"""A trained model that labels texts: sentiment, topic, intent.

regard.load("runs/x").predict(["what a film"])[0][0].text
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch

from regard.core import Model, UserError
from regard.data.batches import FIRST_LABEL, pad_rows
from regard.data.tokenizer import Tokenizer
from regard.decode import Way
from regard.run import AHEAD, LONGEST, Prediction

BUDGET = 8192  # positions that are worked on side by side


class Labeller:
    """source: the texts' tokenizer; target: that of the labels."""

    pairs = True  # of text and label
    metrics = ("loss", "accuracy", "f1")  # what tells how good it is

    def __init__(self, model: Model, source: Tokenizer, target: Tokenizer, folder: Path | None = None, note: str = ""):
        self.model, self.source, self.target, self.folder, self.note = model.eval(), source, target, folder, note
        self.device = next(model.parameters()).device
        self.way = Way()

    def predict(self, texts: Iterable[str], way: Way | None = None, align: bool = False) -> list[list[Prediction]]:
        """For every text its `way.best` likeliest labels, in the order of the texts."""
        return list(self.answers(texts, way, align, ahead=sys.maxsize))

    def answers(
        self,
        texts: Iterable[str],
        way: Way | None = None,
        align: bool = False,
        ahead: int = AHEAD,
        tick: Callable[[int], None] = lambda done: None,
    ) -> Iterator[list[Prediction]]:
        """The same one by one, reading so many texts ahead."""
        way = way or self.way
        if isinstance(texts, str):
            raise UserError("texts come in a list: for a single one, say [text]")
        if align:
            raise UserError("a label has no alignment with its text")
        limit = min(way.longest or LONGEST, self.model.limit or LONGEST)
        source, begun = iter(texts), 0
        while some := list(islice(source, ahead)):
            rows = [[*ids, self.source.end] for ids in self.source.encode(some)]
            cut = [len(ids) > limit for ids in rows]
            if any(cut) and not way.cut:
                number = cut.index(True)
                raise UserError(
                    f"line {begun + number + 1} has {len(rows[number]):,} tokens, and at most {limit:,} can be taken: "
                    "shorten it, or let it be cut (decode.cut)"
                )
            rows = [ids[:limit] for ids in rows]
            found: list[list[Prediction]] = [[]] * len(some)
            for numbers in self._batches(rows):
                for number, answers in zip(numbers, self._label([rows[i] for i in numbers], way.best), strict=True):
                    found[number] = [one._replace(cut=cut[number]) for one in answers]
                tick(len(numbers))
            yield from found
            begun += len(some)

    def stream(self, text: str, way: Way | None = None) -> Iterator[str]:
        yield self.predict([text], way)[0][0].text

    def _batches(self, rows: list[list[int]]) -> Iterator[list[int]]:
        """Which texts go together: of about equal length."""
        together: list[int] = []
        for number in sorted(range(len(rows)), key=lambda i: len(rows[i])):
            if together and (len(together) + 1) * len(rows[number]) > BUDGET:
                yield together
                together = []
            together.append(number)
        if together:
            yield together

    @torch.no_grad()
    def _label(self, rows: list[list[int]], best: int) -> Iterator[list[Prediction]]:
        tokens, valid = pad_rows(rows, self.source.pad)  # type: ignore[arg-type]
        valid = None if bool(valid.all()) else valid.to(self.device)
        logs = self.model(tokens.to(self.device), valid).float().log_softmax(-1)
        values, labels = logs.topk(min(best, logs.shape[-1]))
        for some_values, some_labels in zip(values.tolist(), labels.tolist(), strict=True):
            names = self.target.tokens(label + FIRST_LABEL for label in some_labels)
            yield [Prediction(name, value, value, [name], True) for name, value in zip(names, some_values, strict=True)]
