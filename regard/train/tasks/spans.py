"""A text with stretches cut out: an encoder-decoder that learns to say what stood there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from regard.core import Model, UserError
from regard.core.parts import fit
from regard.data import Batches, Corpus, Lines, Tokenizer, prepare_text
from regard.parts.objectives.span_corruption import Corrupted, Corrupter, Noise, in_order, with_sentinels
from regard.train.dev import Dev
from regard.use.spans import SpanFiller

from .task import DEV_TOKENS, Say, Tick
from .text import Text


class Spans(Text):
    usual = "bpe"

    def ask(self, names: Sequence[str]) -> None:
        self.noise = Noise(**fit(Noise, self.own, {}, "objective"))
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

    def run(self, model: Model, folder: Path | None, documents: bool) -> SpanFiller:
        return SpanFiller(model, self.source, self.target, folder)
