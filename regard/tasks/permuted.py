"""Go on with a text by a model that predicts tokens in any order: all that is there is told, and the next place is
asked about, again and again. An encoder learns from a text whose tokens are told in random orders.

regard.load("runs/xlnet").predict(["once upon a time"])[0][0].text
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard import metrics as measures
from regard.bases.cache import write
from regard.core import Context, Memory, Model, UserError
from regard.data import Corpus, Lines, once, prepare_text
from regard.data.orders import Orders
from regard.data.streams import Streams
from regard.data.tokenizer import Tokenizer
from regard.decode import DecodeConfig
from regard.parts.objectives.objective import Objective
from regard.parts.objectives.permuted import Orderly, Permuted, ask, begin, fits, measured
from regard.runs.folder import about
from regard.runs.settings import Settings
from regard.schema import check_arguments

from .dev import FORCED, Dev
from .run import Run
from .task import Say, Tick
from .text import Text

BUDGET = 8192  # tokens of a batch


class Told(NamedTuple):
    """What a row holds so far."""

    tokens: Tensor  # (batch, capacity + 1); the last takes what is not real
    lengths: Tensor  # (batch,)


class Next(nn.Module):
    """Steps, as a decoder does, with a model that has no state to go on from: all is read again for every token."""

    kind, limit, source_limit = "decoder", None, None

    def __init__(self, model: Model):
        super().__init__()
        self.inner, self.recipe = model, getattr(model, "recipe", {})

    def start(self, batch: int, capacity: int, memory: Memory | None = None) -> Told:
        device = next(self.parameters()).device
        empty = torch.zeros(batch, capacity + 1, dtype=torch.long, device=device)
        return Told(empty, torch.zeros(batch, dtype=torch.long, device=device))

    def step(self, tokens: Tensor, state: Told, valid: Tensor | None = None) -> tuple[Tensor, Told]:
        """The scores (batch, n, vocab) of what comes after the last of these tokens, for each of them the same."""
        room, n = state.tokens.shape[1] - 1, tokens.shape[1]
        slot = state.lengths[:, None] + torch.arange(n, device=tokens.device)
        count = tokens.new_full((len(tokens),), n) if valid is None else valid.sum(1)
        slot = slot if valid is None else torch.where(valid, slot, room)
        held, lengths = write(state.tokens, slot, tokens), state.lengths + count
        told = held[:, : int(lengths.max())]
        real = torch.arange(told.shape[1], device=told.device) < lengths[:, None]
        _, x, _ = ask(self.inner, told, lengths[:, None], begin(self.inner, len(told)), real)
        scores = self.inner.head(x, Context.begin(len(told), 1, told.device))
        return scores.expand(-1, n, -1), Told(held, lengths)


class Onward(Run):
    """Made of the same things as every Run; how good it is, its own objective tells."""

    def __init__(self, model: Model, source: Tokenizer, target: Tokenizer, folder: Path | None = None, note: str = ""):
        known = about(folder) if folder is not None and (folder / "run.json").is_file() else {}
        documents, foreign = bool(known.get("documents", True)), "origin" in known
        super().__init__(Next(model), source, target, folder, documents, note, foreign)  # type: ignore

    @property
    def metrics(self) -> list[str]:
        """Only one token in a few is asked for, so nothing can be told of all characters."""
        return list(FORCED)

    def _room(self, positions: int, config: DecodeConfig, workers: int) -> int:
        return max(
            (config.max_batch_tokens or BUDGET) // (config.beam * positions), 1
        )  # there is no state: all is worked on anew

    def evaluate(self, lines: Iterable[tuple[str, ...]], metrics: Sequence[str]) -> dict[str, Any]:
        """Of one token in a few, by orders that are always the same."""
        measures.check(metrics, self.metrics)
        rows = list(lines)
        mark = [self.target.end] if self.ends(getattr(lines, "documents", True)) else []
        coded = self.target.encode([text for (text,) in rows])
        text = np.fromiter(chain.from_iterable([*ids, *mark] for ids in coded), np.int64)
        table = {k: v for k, v in self.model.recipe.get("objective", {}).items() if k != "part"}
        context = Settings.read(self.model.recipe.get("train", {})).context_length
        orders = in_orders(text, context, Orderly(**check_arguments(Orderly, table, {}, "objective")))
        nll, count = measured(self.model.inner, once(orders))  # type: ignore[arg-type,union-attr]
        values = {"loss": nll / count, "perplexity": math.exp(min(nll / count, 700))}
        told = {"scores": {name: values[name] for name in metrics}, "signatures": {}, "seconds": {}}
        return told | {"counts": {"examples": len(rows), "tokens": count}}


def in_orders(text: np.ndarray, context: int, orderly: Orderly) -> Orders:
    """A text to be evaluated on."""
    if len(text) < 3:
        raise UserError(f"a text of {len(text)} tokens is too short to tell how good a model is")
    context = min(context, len(text) - 1)
    rows = max(1, min(BUDGET // context, len(text) // (4 * context)))
    return Orders(Streams(text, context, rows, 0), orderly.every, 0)


class PermutedText(Text):
    learns = "permuted"
    kind = "encoder"
    predictor = Onward

    def ask(self, names: Sequence[str]) -> None:
        self.orderly = Orderly(**check_arguments(Orderly, self.own, {}, "objective"))
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
