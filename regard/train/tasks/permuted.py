"""A text whose tokens are told in random orders: an encoder that predicts the last of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from regard.core import Model
from regard.core.parts import fit
from regard.data import Corpus, Lines, once, prepare_text
from regard.data.orders import Orders
from regard.data.streams import Streams
from regard.parts.objectives.objective import Objective
from regard.parts.objectives.permuted import Orderly, Permuted, fits
from regard.train.dev import Dev
from regard.use.onward import Onward, in_orders

from .task import Say, Tick
from .text import Text


class PermutedText(Text):
    def ask(self, names: Sequence[str]) -> None:
        self.orderly = Orderly(**fit(Orderly, self.own, {}, "objective"))
        super().ask(names)

    def fit(self, model: Model) -> None:
        super().fit(model)
        fits(model)

    def objective(self) -> Objective:
        return Permuted(self.settings.label_smoothing)

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Any:
        s = self.settings
        text = prepare_text(corpus.train, self.target, self.data("train.ids"), partial(tick, "preparing"))
        streams = Streams(text, s.context_length, s.batch_size or max(s.batch_tokens // s.context_length, 1), s.seed)
        return Orders(streams, self.orderly.every, s.seed)

    def dev(self, model: Model, lines: Lines) -> Dev:
        text = prepare_text(lines, self.target, self.data("dev.ids"))
        orders = in_orders(text, self.settings.context_length, self.orderly)
        return Dev(self.objective(), lambda: once(orders), self.run)  # type: ignore[arg-type]

    def run(self, model: Model, folder: Path | None, documents: bool) -> Onward:
        return Onward(model, self.source, self.target, folder)
