"""Translate with a decoder that writes all tokens at once: it learns from pairs, as any encoder-decoder does, by an
objective of its own, and fills a canvas instead of continuing a prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from regard.core import Model, UserError
from regard.data import PreparedDataset
from regard.data.alignment import TranslationTable
from regard.data.batches import Fertilities
from regard.decode import DecodeConfig
from regard.decode.canvas import Marks, strategy_for, write
from regard.parts.objectives.objective import Objective
from regard.parts.objectives.parallel import Parallel, SpecialTokens
from regard.schema import class_in, files, find, make, name_of

from .run import EncodedInput, Prediction, Run
from .translate import Pairs


class ParallelTranslator(Run):
    """A trained model that writes all tokens of an answer at once."""

    options = ("beam", "iterations", "length_beam", "max_new_tokens", "num_return", "strategy", "truncate")

    @cached_property
    def config(self) -> DecodeConfig:
        return DecodeConfig.read(getattr(self.model, "recipe", {}).get("decode", {}))

    @property
    def metrics(self) -> list[str]:
        """Return the metrics that it is evaluated by: those of its answers."""
        return ["bleu", "chrf", "exact", "token_error"]

    @property
    def marks(self) -> Marks:
        return Marks(self.target.pad, self.target.start, self.target.end)

    def check(self, config: DecodeConfig) -> None:
        """Refuse settings of autoregressive decoders."""
        strategy = strategy_for(self.model, config)
        if config.beam > 1 and strategy != "ctc":
            raise UserError(
                "--beam is for decoders that write one token after the other, or for --strategy ctc: this one writes "
                "all at once, and tries several lengths with --length-beam"
            )
        if config.num_return > max(config.length_beam, config.beam):
            raise UserError(f"{config.num_return} answers for each input need --length-beam {config.num_return}")

    def _answer(self, coded: list[EncodedInput], config: DecodeConfig, attention: bool) -> list[list[Prediction]]:
        if not config.strategy:
            usual, given = self.config, {"strategy": self.config.strategy}
            for name in ("iterations", "length_beam"):
                if getattr(config, name) == getattr(DecodeConfig, name):
                    given[name] = getattr(usual, name)
            config = replace(config, **given)
        self.check(config)
        if attention:
            raise UserError("a decoder that writes all tokens at once gives no alignment yet")
        tokens, valid = self._padded([one.ids for one in coded], self.source.pad)
        with torch.no_grad():
            found = write(self.model, self.model.encode(tokens, valid), self.marks, config)
        return [
            [self._prediction(one, answer, None) for answer in answers[: config.num_return]]
            for one, answers in zip(coded, found, strict=True)
        ]

    def stream(self, text: str, config: DecodeConfig | None = None) -> Iterator[str]:
        """Yield the whole answer: all its tokens are written together."""
        if whole := self.predict([text], config)[0][0].text:
            yield whole


class ParallelPairs(Pairs):
    objective_name = "parallel"
    predictor = ParallelTranslator
    _table: TranslationTable | None = None

    @classmethod
    def learns(cls, objective: Any) -> bool:
        path = files(Parallel).get(objective) if isinstance(objective, str) else None
        return path is not None and class_in(path, Parallel) is not None

    def check_model(self, model: Model) -> None:
        if model.length is None:
            raise UserError(
                "this objective is for a decoder that writes all tokens at once, and nothing decides how many there "
                "are: add model.length, such as 'classifier', 'ratio', 'fertility' or 'empty'"
            )
        needed = self._class().head
        if needed and name_of(model.head) != needed:
            raise UserError(f"the objective '{name_of(self._class())}' needs model.head = '{needed}'")

    def fertilities(self, model: Model, data: PreparedDataset) -> Fertilities | None:
        """Return the fertilities by an alignment that is learned from the training data, which come first."""
        if model.length is None or name_of(model.length) != "fertility":
            return None
        if self._table is None:
            pairs = ((data[i][0], data[i][1]) for i in range(len(data.lengths)))
            self._table = TranslationTable.learn(pairs, (model.source_vocab, model.vocab))
        return self._table.fertilities

    def _class(self) -> type[Parallel]:
        return find(Parallel, self.objective_part)

    def objective(self) -> Objective:
        special = SpecialTokens(self.target.pad, self.target.start, self.target.end)
        kind = self._class()
        inherited = {"special": special, "smoothing": self.settings.label_smoothing}
        return make(kind, self.objective_args, inherited, "objective")  # type: ignore[return-value]
