"""Say what was cut out of a text: an encoder-decoder learns from texts with stretches cut out, and answers other texts
as it was taught to.

regard.load("runs/x").predict(["thank you <extra_id_0> me to your party <extra_id_1> week"])[0][0].text
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard import metrics as measures
from regard.core import Model, UserError
from regard.data import Batches, Corpus, Lines, Tokenizer, prepare_text
from regard.data.masks import reading_masks
from regard.decode import DecodeConfig
from regard.parts.objectives.next_token import NextToken
from regard.parts.objectives.span_corruption import (
    NAME,
    Corrupted,
    Corrupter,
    Noise,
    in_order,
    sentinels_of,
    with_sentinels,
)
from regard.runs.folder import about
from regard.runs.settings import Settings
from regard.schema import check_arguments

from .dev import FORCED, Dev
from .reader import BUDGET
from .run import Coded, Run
from .task import DEV_TOKENS, Say, Tick
from .text import Text


class SpanFiller(Run):
    """A text with sentinels is given back filled in; to any other the answer is what the decoder says. Where it has
    learned from texts here, it is measured on texts; a model from elsewhere, on pairs."""

    def __init__(self, model: Model, source: Tokenizer, target: Tokenizer, folder: Path | None = None, note: str = ""):
        super().__init__(model, source, target, folder, True, note)
        self.reads = "pairs"
        if folder is not None and "job" in about(folder):
            self.reads, self.evaluate = "text", self.measured

    @property
    def metrics(self) -> list[str]:
        return list(FORCED) if self.reads == "text" else super().metrics

    @cached_property
    def sentinels(self) -> set[int]:
        return set(sentinels_of(self.source).tolist())

    def code(self, texts: list[str], config: DecodeConfig, begun: int = 0) -> list[Coded]:
        if not any(_holed(text) for text in texts):
            return super().code(texts, config, begun)
        with reading_masks(self.source):
            return super().code(texts, config, begun)

    def stream(self, text: str, config: DecodeConfig | None = None) -> Iterator[str]:
        if _holed(text):
            yield self.predict([text], config)[0][0].text  # it is filled in from the middle
        else:
            yield from super().stream(text, config)

    @torch.no_grad()
    def measured(self, lines: Iterable[tuple[str, ...]], metrics: Sequence[str]) -> dict[str, Any]:
        """As regard.evaluate tells it: what is cut out of a text is the same every time."""
        measures.check(metrics, FORCED)
        begun, rows = time.perf_counter(), list(lines)
        table = self.model.recipe  # type: ignore[union-attr]
        noise = Noise(**{key: value for key, value in table.get("objective", {}).items() if key != "part"})
        context = Settings.read(table.get("train", {})).context_length
        marks = [self.source.end] if getattr(lines, "documents", True) or not self.source.keeps_lines() else []
        coded = self.source.encode([text for (text,) in rows])
        text = np.fromiter(chain.from_iterable([*ids, *marks] for ids in coded), np.int64)
        if len(text) < 2:
            raise UserError("there is nothing to evaluate: the data has not two tokens")
        make = partial(in_order, text, context, max(BUDGET // context, 1), Corrupter(noise, self.source, context))
        found = Dev(NextToken(), make, lambda model, folder, documents: self)(self.model)
        told = {"scores": {name: found[name] for name in metrics}, "signatures": {}, "counts": {"examples": len(rows)}}
        return told | {"seconds": {"loss": time.perf_counter() - begun}}

    def _text(self, one: Coded, ids: list[int]) -> str:
        if not self.sentinels.intersection(one.ids):
            return super()._text(one, [number for number in ids if number not in self.sentinels])
        said: dict[int, list[int]] = {}
        span: list[int] = []
        for number in ids:
            if number in self.sentinels:
                span = said.setdefault(number, [])
            else:
                span.append(number)
        return self.source.decode(number for read in one.ids for number in said.get(read, self._kept(read)))

    def _kept(self, number: int) -> list[int]:
        """A token of the text stays; of a stretch that nothing was said about, nothing does."""
        return [] if number in self.sentinels else [number]


def _holed(text: str) -> bool:
    return NAME.partition("{")[0] in text


class Spans(Text):
    learns = "span_corruption"
    kind = "encoder-decoder"
    predictor = SpanFiller
    usual = "bpe"

    def ask(self, names: Sequence[str]) -> None:
        self.noise = Noise(**check_arguments(Noise, self.own, {}, "objective"))
        super().ask(names)

    def tokenizer(self, corpus: Corpus, kind: str, tick: Tick, *columns: int) -> Tokenizer:
        return with_sentinels(super().tokenizer(corpus, kind, tick, *columns), self.noise.sentinels)

    def fit(self, model: Model) -> None:
        context = self.settings.context_length
        if context < 2:
            raise UserError(f"train.context_length must be at least 2, so that something is left, not {context}")
        gone, spans = self.noise.counts(context)
        sides = (("source", context - gone + spans + 1, model.source_limit), ("target", gone + spans + 1, model.limit))
        for side, length, known in sides:
            if known is not None and length > known:
                raise UserError(
                    f"train.context_length of {context} makes a {side} of {length} tokens, and the positions of this "
                    f"model reach only {known}"
                )

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        s = self.settings
        stream = prepare_text(corpus.train, self.target, self.data("train.ids"), partial(tick, "preparing"))
        return Corrupted(
            stream,
            s.context_length,
            s.batch_size or max(s.batch_tokens // s.context_length, 1),
            s.seed,
            self._corrupter(),
        )

    def dev(self, model: Model, lines: Lines) -> Dev:
        context, text = self.settings.context_length, prepare_text(lines, self.target, self.data("dev.ids"))
        if len(text) < 2:
            raise UserError(f"there is nothing to cut out of {lines.name}: it has but one token")
        make = partial(in_order, text, context, max(DEV_TOKENS // context, 1), self._corrupter())
        return Dev(self.objective(), make, self.run)

    def _corrupter(self) -> Corrupter:
        return Corrupter(self.noise, self.target, self.settings.context_length)
