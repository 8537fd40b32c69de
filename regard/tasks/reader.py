"""A trained model that reads texts whole and answers each by itself: what those that label, tag and fill share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from regard.core import Model, UserError
from regard.data.batches import Batches, pad_rows
from regard.data.tokenizer import Tokenizer
from regard.decode import DecodeConfig
from regard.parts.objectives.objective import Objective

from .run import MAX_SOURCE_TOKENS, READ_AHEAD, Prediction

BUDGET = 512  # positions that are worked on side by side by a CPU: no more than stay near it
DEVICE_BUDGET = 8192  # by anything else


class Reader:
    """source: the texts' tokenizer; target: that of the answers.

    pairs:   its data are texts with their answers.
    reads:   what a record of such data is, for open_corpus.
    takes:   what it is given to answer: texts, which are lines of files; else (images, sounds) `read(files)` makes of
             every file one input.
    options: of `regard predict` that mean something to it. Those that DecodeConfig does not have become attributes of
             the same name before it is asked.
    metrics: what tells how good it is.
    """

    pairs = True
    reads: str = "pairs"
    takes: str = "texts"
    options: Sequence[str] = ("num_return", "truncate")
    metrics: Sequence[str] = ("loss",)

    def __init__(self, model: Model, source: Tokenizer, target: Tokenizer, folder: Path | None = None, note: str = ""):
        self.model, self.source, self.target, self.folder, self.note = model.eval(), source, target, folder, note
        self.device = next(model.parameters()).device
        self.config = DecodeConfig.read(getattr(model, "recipe", {}).get("decode", {}))

    def objective(self) -> Objective:
        """What its loss is."""
        raise NotImplementedError

    def labels(self, row: Sequence[str]) -> list[str]:
        """Return the right labels of a record, one for each that is asked for; none where answers are no labels."""
        return []

    def encode_examples(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[np.ndarray, ...]]:
        """Examples in tokens, as `batches` wants them."""
        raise NotImplementedError

    def batches(self, data: Sequence, budget: int) -> Batches:
        """Examples in tokens, as its objective wants them."""
        raise NotImplementedError

    def predict_rows(self, rows: list[list[int]], config: DecodeConfig) -> Iterator[list[Prediction]]:
        """The answers to some texts of about equal length, best first."""
        raise NotImplementedError

    def complete_answers(self, text: str, answers: list[Prediction]) -> list[Prediction]:
        """The answers once more, now that it is known what they are answers to."""
        return answers

    @property
    def budget(self) -> int:
        """Positions that are worked on side by side."""
        return BUDGET if self.device.type == "cpu" else DEVICE_BUDGET

    @property
    def limit(self) -> int | None:
        """Tokens of a text that the positions reach."""
        return self.model.limit

    def embed(self, texts: Sequence[str], pool: str | None = None, normalize: bool | None = None) -> Tensor:
        """(texts, width) a vector for each: see tasks/embed.py."""
        from .embed import Embedder

        return Embedder.of(self).embed(texts, pool, normalize)

    def predict(
        self, texts: Iterable[str], config: DecodeConfig | None = None, attention: bool = False
    ) -> list[list[Prediction]]:
        """For every text its answers, best first, in the order of the texts."""
        return list(self.answers(texts, config, attention, read_ahead=sys.maxsize))

    def answers(
        self,
        texts: Iterable[str],
        config: DecodeConfig | None = None,
        attention: bool = False,
        read_ahead: int = READ_AHEAD,
        tick: Callable[[int], None] = lambda done: None,
    ) -> Iterator[list[Prediction]]:
        """The same one by one, reading so many texts ahead."""
        config = config or self.config
        if isinstance(texts, str):
            raise UserError("texts come in a list: for a single one, say [text]")
        if attention:
            raise UserError("only a decoder looks at a source, so here is no alignment with it")
        source, lines_before = iter(texts), 0
        while some := list(islice(source, read_ahead)):
            rows, cut = self.encode_inputs(some, config, lines_before)
            found: list[list[Prediction]] = [[]] * len(some)
            for numbers in batch_by_length([len(row) for row in rows], self.budget):
                for number, answers in zip(numbers, self.predict_rows([rows[i] for i in numbers], config), strict=True):
                    whole = self.complete_answers(some[number], answers)
                    found[number] = [one._replace(cut=cut[number]) for one in whole]
                tick(len(numbers))
            yield from found
            lines_before += len(some)

    def stream(self, text: str, config: DecodeConfig | None = None) -> Iterator[str]:
        yield self.predict([text], config)[0][0].text

    def encode_inputs(
        self, texts: list[str], config: DecodeConfig, lines_before: int = 0
    ) -> tuple[list[list[int]], list[bool]]:
        """Texts as tokens with their marks, none longer than the model takes, and which of them were cut for it."""
        limit = min(config.max_source_tokens or MAX_SOURCE_TOKENS, self.limit or MAX_SOURCE_TOKENS)
        rows = self.source.encode_with_special_tokens(texts)
        return [truncated(ids, limit) for ids in rows], check_lengths(
            [len(ids) for ids in rows], limit, config, lines_before
        )

    def padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
        """(batch, time), and which of it is real; None: all."""
        tokens, valid = pad_rows(rows, self.source.pad)
        return tokens.to(self.device), None if bool(valid.all()) else valid.to(self.device)


def check_lengths(lengths: Sequence[int], limit: int, config: DecodeConfig, lines_before: int) -> list[bool]:
    """Which texts are; refused, unless they may be cut. begun: how many lines came before these."""
    cut = [length > limit for length in lengths]
    if any(cut) and not config.truncate:
        number = cut.index(True)
        raise UserError(
            f"line {lines_before + number + 1} has {lengths[number]:,} tokens, and at most {limit:,} can be taken: "
            "shorten it, or let it be cut (--truncate, or decode.truncate in its recipe)"
        )
    return cut


def truncated(ids: list[int], limit: int) -> list[int]:
    """At most so many tokens, the last one, which is a mark, among them."""
    return ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]


def batch_by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Which texts are worked on side by side: of about equal length."""
    some: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if some and (len(some) + 1) * lengths[number] > budget:
            yield some
            some = []
        some.append(number)
    if some:
        yield some


def top_classes(scores: Tensor, best: int) -> Iterator[list[tuple[int, float]]]:
    """scores (batch, classes) -> of each row the `best` likeliest classes and their log p."""
    logs = scores.float().log_softmax(-1)
    values, classes = logs.topk(min(best, logs.shape[-1]))
    for some_classes, some_values in zip(classes.tolist(), values.tolist(), strict=True):
        yield list(zip(some_classes, some_values, strict=True))
