"""The base of predictors that read a whole text and answer it in one pass: those that classify, tag and fill in."""

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

BUDGET = 512  # positions of a batch on a CPU, few enough to stay in its cache
DEVICE_BUDGET = 8192  # positions of a batch on any other device


class Reader:
    """A model with its tokenizers: `source` for the texts, `target` for the answers.

    pairs:   whether its data are texts with answers.
    reads:   the kind of a record of its data, for open_corpus.
    takes:   the kind of its inputs: texts, which are lines of files; for others (images, sounds) `read(files)` turns
             every file into one input.
    options: the options of `regard predict` that it supports. Those that DecodeConfig does not have are set as
             attributes of the same name.
    metrics: the metrics that it is evaluated by.
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
        """Return the objective that computes its loss."""
        raise NotImplementedError

    def labels(self, row: Sequence[str]) -> list[str]:
        """Return the labels of a record, one per prediction; none where answers are not labels."""
        return []

    def encode_examples(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[np.ndarray, ...]]:
        """Return examples as token arrays, as `batches` takes them."""
        raise NotImplementedError

    def batches(self, data: Sequence, budget: int) -> Batches:
        """Return batches of examples, as the objective takes them."""
        raise NotImplementedError

    def predict_rows(self, rows: list[list[int]], config: DecodeConfig) -> Iterator[list[Prediction]]:
        """Yield the answers to a batch of inputs, best first."""
        raise NotImplementedError

    def complete_answers(self, text: str, answers: list[Prediction]) -> list[Prediction]:
        """Return the answers, completed with what depends on the input text."""
        return answers

    @property
    def budget(self) -> int:
        """Return the most positions of a batch."""
        return BUDGET if self.device.type == "cpu" else DEVICE_BUDGET

    @property
    def limit(self) -> int | None:
        """Return the most tokens of a text that the model can read; None: no limit."""
        return self.model.limit

    def embed(self, texts: Sequence[str], pool: str | None = None, normalize: bool | None = None) -> Tensor:
        """Return the vectors of texts, (texts, width); see tasks/embed.py."""
        from .embed import Embedder

        return Embedder.of(self).embed(texts, pool, normalize)

    def predict(
        self, texts: Iterable[str], config: DecodeConfig | None = None, attention: bool = False
    ) -> list[list[Prediction]]:
        """Return for every text its answers, best first, in the order of the texts."""
        return list(self.answers(texts, config, attention, read_ahead=sys.maxsize))

    def answers(
        self,
        texts: Iterable[str],
        config: DecodeConfig | None = None,
        attention: bool = False,
        read_ahead: int = READ_AHEAD,
        tick: Callable[[int], None] = lambda done: None,
    ) -> Iterator[list[Prediction]]:
        """Yield the answers of `predict` one text at a time, reading `read_ahead` texts ahead."""
        config = config or self.config
        if isinstance(texts, str):
            raise UserError("texts come in a list: for a single one, say [text]")
        if attention:
            raise UserError("only an encoder-decoder attends to a source, so there is no alignment")
        source, lines_before = iter(texts), 0
        while some := list(islice(source, read_ahead)):
            rows, cut = self.encode_inputs(some, config, lines_before)
            found: list[list[Prediction]] = [[]] * len(some)
            for numbers in batch_by_length([len(row) for row in rows], self.budget):
                for number, answers in zip(numbers, self.predict_rows([rows[i] for i in numbers], config), strict=True):
                    completed = self.complete_answers(some[number], answers)
                    found[number] = [one._replace(cut=cut[number]) for one in completed]
                tick(len(numbers))
            yield from found
            lines_before += len(some)

    def stream(self, text: str, config: DecodeConfig | None = None) -> Iterator[str]:
        yield self.predict([text], config)[0][0].text

    def encode_inputs(
        self, texts: list[str], config: DecodeConfig, lines_before: int = 0
    ) -> tuple[list[list[int]], list[bool]]:
        """Return the token ids of texts, truncated to what the model takes, and which texts were truncated.

        lines_before: the number of earlier inputs, for line numbers in messages.
        """
        limit = min(config.max_source_tokens or MAX_SOURCE_TOKENS, self.limit or MAX_SOURCE_TOKENS)
        rows = self.source.encode_with_special_tokens(texts)
        return [truncated(ids, limit) for ids in rows], check_lengths(
            [len(ids) for ids in rows], limit, config, lines_before
        )

    def padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
        """Return the rows padded, (batch, time), and which positions are real; None: all."""
        tokens, valid = pad_rows(rows, self.source.pad)
        return tokens.to(self.device), None if bool(valid.all()) else valid.to(self.device)


def check_lengths(lengths: Sequence[int], limit: int, config: DecodeConfig, lines_before: int) -> list[bool]:
    """Return which texts are too long; refuse them unless `config.truncate`. lines_before: the number of earlier
    inputs."""
    cut = [length > limit for length in lengths]
    if any(cut) and not config.truncate:
        number = cut.index(True)
        raise UserError(
            f"line {lines_before + number + 1} has {lengths[number]:,} tokens, and at most {limit:,} can be taken: "
            "shorten it, or let it be cut (--truncate, or decode.truncate in its recipe)"
        )
    return cut


def truncated(ids: list[int], limit: int) -> list[int]:
    """Return at most `limit` tokens, keeping the last, which is a special token."""
    return ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]


def batch_by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yield the indices of each batch: texts of similar length."""
    some: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if some and (len(some) + 1) * lengths[number] > budget:
            yield some
            some = []
        some.append(number)
    if some:
        yield some


def top_classes(scores: Tensor, best: int) -> Iterator[list[tuple[int, float]]]:
    """Yield for each row of logits (batch, classes) the `best` most likely classes and their log p."""
    logs = scores.float().log_softmax(-1)
    values, classes = logs.topk(min(best, logs.shape[-1]))
    for some_classes, some_values in zip(classes.tolist(), values.tolist(), strict=True):
        yield list(zip(some_classes, some_values, strict=True))
