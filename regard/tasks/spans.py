"""Fill in the spans that were cut out of a text: an encoder-decoder learns by span corruption, and answers texts
without sentinels as it was fine-tuned to.

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
from regard.data import Batches, Corpus, CorpusSplit, Tokenizer, prepare_text
from regard.data.masks import parsing_special_tokens
from regard.decode import DecodeConfig
from regard.parts.objectives.next_token import NextToken
from regard.parts.objectives.span_corruption import (
    SENTINEL,
    CorruptedWindows,
    Corrupter,
    SpanNoise,
    add_sentinels,
    corrupted_batches,
    sentinel_ids,
)
from regard.runs.folder import read_run_json
from regard.runs.settings import Settings
from regard.schema import check_arguments

from .dev import LOSS_METRICS, Dev
from .reader import BUDGET
from .run import EncodedInput, Run
from .task import DEV_TOKENS, Say, Tick
from .text import Text


class SpanFiller(Run):
    """Returns a text with sentinels filled in; for any other text, what the decoder generates. A model that was trained
    here on texts is evaluated on texts; a converted model, on pairs."""

    def __init__(self, model: Model, source: Tokenizer, target: Tokenizer, folder: Path | None = None, note: str = ""):
        super().__init__(model, source, target, folder, True, note)
        self.reads = "pairs"
        if folder is not None and "job" in read_run_json(folder):
            self.reads, self.evaluate = "text", self._evaluate

    @property
    def metrics(self) -> list[str]:
        return list(LOSS_METRICS) if self.reads == "text" else super().metrics

    @cached_property
    def sentinels(self) -> set[int]:
        return set(sentinel_ids(self.source).tolist())

    def encode_inputs(self, texts: list[str], config: DecodeConfig, lines_before: int = 0) -> list[EncodedInput]:
        if not any(_has_sentinels(text) for text in texts):
            return super().encode_inputs(texts, config, lines_before)
        with parsing_special_tokens(self.source):
            return super().encode_inputs(texts, config, lines_before)

    def stream(self, text: str, config: DecodeConfig | None = None) -> Iterator[str]:
        if _has_sentinels(text):
            yield self.predict([text], config)[0][0].text  # spans are filled in anywhere, so there is nothing to stream
        else:
            yield from super().stream(text, config)

    @torch.no_grad()
    def _evaluate(self, lines: Iterable[tuple[str, ...]], metrics: Sequence[str]) -> dict[str, Any]:
        """Return the result of regard.evaluate. The same spans are cut out every time."""
        measures.check(metrics, LOSS_METRICS)
        begun, rows = time.perf_counter(), list(lines)
        table = self.model.recipe  # type: ignore[union-attr]
        noise = SpanNoise(**{key: value for key, value in table.get("objective", {}).items() if key != "part"})
        context = Settings.read(table.get("train", {})).context_length
        marks = [self.source.end] if getattr(lines, "documents", True) or not self.source.keeps_newlines() else []
        coded = self.source.encode([text for (text,) in rows])
        text = np.fromiter(chain.from_iterable([*ids, *marks] for ids in coded), np.int64)
        if len(text) < 2:
            raise UserError("there is nothing to evaluate: the data has not two tokens")
        make = partial(
            corrupted_batches, text, context, max(BUDGET // context, 1), Corrupter(noise, self.source, context)
        )
        found = Dev(NextToken(), make, lambda model, folder, documents: self)(self.model)
        result = {
            "scores": {name: found[name] for name in metrics},
            "signatures": {},
            "counts": {"examples": len(rows)},
        }
        return result | {"seconds": {"loss": time.perf_counter() - begun}}

    def _text(self, one: EncodedInput, ids: list[int]) -> str:
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
        """Return a token of the text unchanged, and nothing for a sentinel that the answer does not mention."""
        return [] if number in self.sentinels else [number]


def _has_sentinels(text: str) -> bool:
    return SENTINEL.partition("{")[0] in text


class Spans(Text):
    objective_name = "span_corruption"
    kind = "encoder-decoder"
    predictor = SpanFiller
    default_tokenizer = "bpe"

    def set_metrics(self, names: Sequence[str]) -> None:
        self.noise = SpanNoise(**check_arguments(SpanNoise, self.objective_args, {}, "objective"))
        super().set_metrics(names)

    def tokenizer(self, corpus: Corpus, kind: str, tick: Tick, *columns: int) -> Tokenizer:
        return add_sentinels(super().tokenizer(corpus, kind, tick, *columns), self.noise.sentinels)

    def check_model(self, model: Model) -> None:
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
        stream = prepare_text(corpus.train, self.target, self.data_path("train.ids"), partial(tick, "preparing"))
        return CorruptedWindows(
            stream,
            s.context_length,
            s.batch_size or max(s.batch_tokens // s.context_length, 1),
            s.seed,
            self._corrupter(),
        )

    def dev(self, model: Model, lines: CorpusSplit) -> Dev:
        context, text = self.settings.context_length, prepare_text(lines, self.target, self.data_path("dev.ids"))
        if len(text) < 2:
            raise UserError(f"there is nothing to cut out of {lines.name}: it has but one token")
        make = partial(corrupted_batches, text, context, max(DEV_TOKENS // context, 1), self._corrupter())
        return Dev(self.objective(), make, self.make_predictor)

    def _corrupter(self) -> Corrupter:
        return Corrupter(self.noise, self.target, self.settings.context_length)
