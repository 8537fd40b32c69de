"""Translate with a decoder that writes all tokens at once: it learns from pairs, as any encoder-decoder does, by an
objective of its own, and fills a canvas instead of continuing a prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.core import Model, UserError
from regard.data import CorpusSplit
from regard.data.alignment import TranslationTable
from regard.data.batches import Fertilities, SequenceDataset
from regard.data.prepare import Subset
from regard.decode import DecodeConfig
from regard.decode.canvas import Marks, blank_canvases, canvases, strategy_for, write
from regard.decode.rescore import rescore
from regard.memory import check_fits_memory
from regard.parts.objectives.objective import Objective
from regard.parts.objectives.parallel import Parallel, SpecialTokens
from regard.schema import class_in, files, find, make, name_of

from .run import LOGIT_BYTES, MAX_ROWS, EncodedInput, Prediction, Run
from .task import Say, Tick
from .translate import Pairs

MAX_CANVAS_BYTES = 1 << 30  # of the logits of all canvases that are filled together
ITERATIVE = ("mask_predict", "edit")  # strategies of several passes
MAX_SHORT = 0.01  # share of the pairs that may be left out because they do not fit on the canvas


class ParallelTranslator(Run):
    """A trained model that writes all tokens of an answer at once."""

    options = ("beam", "iterations", "length_beam", "max_new_tokens", "num_return", "rescore", "strategy", "truncate")
    _judge: Run | None = None

    @property
    def rescore(self) -> Run | None:
        """Return the autoregressive run over the same tokens that ranks the answers."""
        return self._judge

    @rescore.setter
    def rescore(self, judge: Run | str | Path | None) -> None:
        if isinstance(judge, str | Path):
            from .load import load

            judge = load(judge, str(self.device))  # type: ignore[assignment]
        if judge is not None:
            if type(judge) is not Run or not judge.pairs:
                raise UserError(
                    "a judge writes one token after the other: --rescore takes an encoder-decoder that does"
                )
            if any(a.hash() != b.hash() for a, b in ((judge.source, self.source), (judge.target, self.target))):
                raise UserError(
                    "a judge must be a model over the very same tokens: train this one with --teacher, or both with "
                    "--tokenizer FILE.json"
                )
        self._judge = judge

    @cached_property
    def config(self) -> DecodeConfig:
        usual = DecodeConfig.read(getattr(self.model, "recipe", {}).get("decode", {}))
        return replace(usual, strategy=strategy_for(self.model, usual))

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
        if strategy not in ITERATIVE and config.iterations not in (self.config.iterations, DecodeConfig.iterations):
            raise UserError(
                f"the strategy '{strategy}' takes one pass: leave out --iterations, or say --strategy mask_predict"
            )
        assert self.model.length is not None
        if config.length_beam > 1 and not self.model.length.is_exact:
            raise UserError(
                "this decoder finds the length on its canvas, so there are no lengths to try: leave out --length-beam"
            )
        if self._judge is not None and config.length_beam == 1:
            raise UserError("a judge ranks several answers: say --length-beam 5 as well")
        if config.num_return > config.length_beam:
            raise UserError(
                f"{config.num_return} answers for each input need --length-beam {config.num_return}"
                if self.model.length.is_exact
                else "this decoder gives one answer for each input: leave out --num-return"
            )
        if config.samples or config.repetition_penalty != 1 or config.shortlist or config.speculate:
            raise UserError(
                "a decoder that writes all tokens at once takes no temperature, repetition penalty, shortlist or drafts"
            )

    def _answer(self, coded: list[EncodedInput], config: DecodeConfig, attention: bool) -> list[list[Prediction]]:
        if not config.strategy:
            config = replace(config, strategy=self.config.strategy)
        self.check(config)
        if attention:
            raise UserError("a decoder that writes all tokens at once gives no alignment yet")
        tokens, valid = self._padded([one.ids for one in coded], self.source.pad)
        with torch.no_grad():
            found = write(self.model, self._session().encode(tokens, valid), self.marks, config)
            if self._judge is not None:
                memory, penalty = self._judge.model.encode(tokens, valid), self._judge.config.length_penalty
                found = rescore(self._judge.model, memory, found, self._judge.decoder_prefix, self.target.end, penalty)
        return [
            [self._prediction(one, answer, None) for answer in answers[: config.num_return]]
            for one, answers in zip(coded, found, strict=True)
        ]

    def canvases(self, text: str, config: DecodeConfig | None = None) -> Iterator[str]:
        """Yield what stands on the canvas after every pass, for the most probable length."""
        config = replace(self.config if config is None else config, length_beam=1, num_return=1)
        tokens, _ = self._padded([one.ids for one in self.encode_inputs([text], config)], self.source.pad)
        with torch.no_grad():
            canvas, _ = blank_canvases(self.model, self.model.encode(tokens), config)
            for found in canvases(self.model, canvas, self.marks, config):
                yield self.target.decode(found.tokens[0][found.valid[0]].tolist())

    def _max_new_tokens(self, one: EncodedInput, config: DecodeConfig) -> int:
        """Return the positions of the longest canvas."""
        assert self.model.length is not None
        return config.max_new_tokens or int(self.model.length.most(torch.tensor([len(one.ids)])))

    def _max_rows(self, positions: int, config: DecodeConfig, workers: int) -> int:
        """Return the most inputs of this length in a batch, as logits of all positions are computed together."""
        alone = config.length_beam * positions * LOGIT_BYTES * self.model.vocab
        if self.device.type == "cpu":
            check_fits_memory(f"a canvas of {positions:,} positions, {config.length_beam:,} times", alone)
        most = config.max_batch_tokens // (config.length_beam * positions) if config.max_batch_tokens else MAX_ROWS
        return max(min(most, MAX_CANVAS_BYTES // (workers * alone)), 1)

    def stream(self, text: str, config: DecodeConfig | None = None) -> Iterator[str]:
        """Yield the whole answer: all its tokens are written together."""
        if whole := self.predict([text], config)[0][0].text:
            yield whole


class ParallelPairs(Pairs):
    objective_name = "parallel"
    predictor = ParallelTranslator
    loss_metrics = ("loss",)  # of an alignment or a path, whose exponential is no perplexity of tokens
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

    def prepare(self, model: Model, lines: CorpusSplit, name: str, say: Say, tick: Tick) -> SequenceDataset:
        """Leave out pairs whose target does not fit on the canvas; refuse data with many of them."""
        data, length, kind = super().prepare(model, lines, name, say, tick), model.length, self._class()
        assert length is not None
        sources = torch.from_numpy(data.lengths[:, 0].astype(np.int64))
        needed = torch.tensor([kind.needed(data[i][1]) for i in range(len(data.lengths))])
        fits = length.fits(sources, needed)
        if bool(fits.all()):
            return data
        short, is_train = int((~fits).sum()), name.startswith("train")
        worst = torch.argsort(needed / sources)[: max(round((1 - MAX_SHORT) * len(needed)), 1)]
        what = (
            f"{short:,} of {len(fits):,} pairs of {lines.name} have a target that does not fit on the canvas: "
            f"--set {length.remedy(sources[worst], needed[worst])} would do for nearly all of them"
        )
        if is_train and short > MAX_SHORT * len(fits):
            raise UserError(what)
        say(f"{what}; they are left out")
        return Subset(data, fits.nonzero()[:, 0].numpy())

    def fertilities(self, model: Model, data: SequenceDataset) -> Fertilities | None:
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
