"""A text of which some is hidden: an encoder that learns to fill it in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from regard.core import Model, UserError
from regard.core.parts import fit
from regard.data import Corpus, Lines, Tokenizer, once, prepare_text
from regard.data.columns import is_labelled, shown
from regard.data.masking import Hide, Masking
from regard.data.masks import with_marks
from regard.parts.objectives.masked import Masked, Noise, measured
from regard.parts.objectives.objective import Objective
from regard.use.fill import Filler, measures_of

from .task import DEV_TOKENS, Say, Task, Tick


class MaskedText(Task):
    reads = "text"
    files = "ids"
    usual = "wordpiece"

    def ask(self, names: Sequence[str]) -> None:
        self.noise = Noise(**fit(Noise, self.own, {}, "objective"))
        self.forced = measures_of(self.noise)  # type: ignore[misc]
        super().ask(names)

    def open(self, tick: Callable[[int], None]) -> Corpus:
        corpus = super().open(tick)
        pick = corpus.train.records.pick
        if pick is not None and self.job.columns is None and is_labelled(pick.names):
            raise UserError(
                f"{corpus.train.name} holds texts with labels ({', '.join(map(shown, pick.names))}), and this recipe "
                f"learns from texts alone: say --task classify to learn the labels, or --columns {pick.taken[0]} to "
                "leave them out"
            )
        return corpus

    def tokenizer(self, corpus: Corpus, kind: str, tick: Tick, *columns: int) -> Tokenizer:
        return with_marks(super().tokenizer(corpus, kind, tick, *columns))

    def fit(self, model: Model) -> None:
        context = self.settings.context_length
        if model.limit is not None and context > model.limit:
            raise UserError(
                f"train.context_length is {context}, and the positions of this model reach only {model.limit}"
            )
        if self.noise.next_sentence and not hasattr(model.head, "pair"):
            raise UserError('objective.next_sentence needs a head that answers for pairs: model.head = "pretrain"')
        if model.head.pools:
            raise UserError('hidden tokens need a head that answers at every position: model.head = "vocabulary"')

    def objective(self) -> Objective:
        return Masked(self.settings.label_smoothing)

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Any:
        s = self.settings
        budget = s.batch_size * s.context_length if s.batch_size else max(s.batch_tokens, s.context_length)
        return self._masking(corpus.train, "train.ids", budget, True, partial(tick, "preparing"))

    def dev(self, model: Model, lines: Lines) -> Callable[[Model], dict[str, float]]:
        batches = self._masking(lines, "dev.ids", max(self.settings.batch_tokens, DEV_TOKENS), False, lambda done: None)
        return lambda model: measured(model, once(batches))

    def _masking(self, lines: Lines, name: str, budget: int, shuffle: bool, tick: Callable[[int], None]) -> Masking:
        s, noise = self.settings, self.noise
        stream = prepare_text(lines, self.target, self.data(name), tick)
        hide = Hide(self.target, noise.share, noise.whole_word)
        return Masking(
            stream, self.target, hide, s.context_length, budget, s.seed, noise.next_sentence, lines.documents, shuffle
        )

    def run(self, model: Model, folder: Path | None, documents: bool) -> Filler:
        return Filler(model, self.source, self.target, folder)
