"""Continue a text with a permutation language model, which predicts tokens in any order: all tokens so far are given,
and the next position is predicted, again and again. An encoder learns from a text in random orders.

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
from regard.data import Corpus, CorpusSplit, first_epoch, prepare_text
from regard.data.orders import PermutedBatches
from regard.data.streams import StreamBatches
from regard.data.tokenizer import Tokenizer
from regard.decode import DecodeConfig
from regard.parts.objectives.objective import Objective
from regard.parts.objectives.permuted import (
    Permuted,
    PermutedConfig,
    check_model,
    initial_state,
    permuted_nll,
    query_positions,
)
from regard.runs.folder import read_run_json
from regard.runs.settings import Settings
from regard.schema import check_arguments

from .dev import LOSS_METRICS, Dev
from .run import Run
from .task import Say, Tick
from .text import Text

BUDGET = 8192  # tokens of a batch


class TokensSoFar(NamedTuple):
    """The tokens of every row so far."""

    tokens: Tensor  # (batch, capacity + 1); the last column takes writes of invalid positions
    lengths: Tensor  # (batch,)


class RereadingDecoder(nn.Module):
    """Gives a model without decoding state the interface of a decoder: every step reads all tokens again."""

    kind, limit, source_limit = "decoder", None, None

    def __init__(self, model: Model):
        super().__init__()
        self.inner, self.recipe = model, getattr(model, "recipe", {})

    def start(self, batch: int, capacity: int, memory: Memory | None = None) -> TokensSoFar:
        device = next(self.parameters()).device
        empty = torch.zeros(batch, capacity + 1, dtype=torch.long, device=device)
        return TokensSoFar(empty, torch.zeros(batch, dtype=torch.long, device=device))

    def step(self, tokens: Tensor, state: TokensSoFar, valid: Tensor | None = None) -> tuple[Tensor, TokensSoFar]:
        """Return the logits after the last of these tokens, repeated for each of them, (batch, n, vocab)."""
        capacity, n = state.tokens.shape[1] - 1, tokens.shape[1]
        slot = state.lengths[:, None] + torch.arange(n, device=tokens.device)
        count = tokens.new_full((len(tokens),), n) if valid is None else valid.sum(1)
        slot = slot if valid is None else torch.where(valid, slot, capacity)
        buffer, lengths = write(state.tokens, slot, tokens), state.lengths + count
        tokens_so_far = buffer[:, : int(lengths.max())]
        real = torch.arange(tokens_so_far.shape[1], device=tokens_so_far.device) < lengths[:, None]
        _, x, _ = query_positions(
            self.inner, tokens_so_far, lengths[:, None], initial_state(self.inner, len(tokens_so_far)), real
        )
        scores = self.inner.head(x, Context.begin(len(tokens_so_far), 1, tokens_so_far.device))
        return scores.expand(-1, n, -1), TokensSoFar(buffer, lengths)


class PermutedRun(Run):
    """A run of a permutation language model, which is evaluated by its own objective."""

    def __init__(self, model: Model, source: Tokenizer, target: Tokenizer, folder: Path | None = None, note: str = ""):
        known = read_run_json(folder) if folder is not None and (folder / "run.json").is_file() else {}
        documents, converted = bool(known.get("documents", True)), "origin" in known
        super().__init__(RereadingDecoder(model), source, target, folder, documents, note, converted)  # type: ignore

    @property
    def metrics(self) -> list[str]:
        """Return the metrics. Only a share of the tokens is predicted, so there are no bits per character."""
        return list(LOSS_METRICS)

    def _max_rows(self, positions: int, config: DecodeConfig, workers: int) -> int:
        # There is no state: every step reads all tokens again.
        return max((config.max_batch_tokens or BUDGET) // (config.beam * positions), 1)

    def evaluate(self, lines: Iterable[tuple[str, ...]], metrics: Sequence[str]) -> dict[str, Any]:
        """Return the result of regard.evaluate on a share of the tokens, in fixed orders."""
        measures.check(metrics, self.metrics)
        rows = list(lines)
        mark = [self.target.end] if self.appends_end(getattr(lines, "documents", True)) else []
        coded = self.target.encode([text for (text,) in rows])
        text = np.fromiter(chain.from_iterable([*ids, *mark] for ids in coded), np.int64)
        table = {k: v for k, v in self.model.recipe.get("objective", {}).items() if k != "part"}
        context = Settings.read(self.model.recipe.get("train", {})).context_length
        orders = eval_orders(text, context, PermutedConfig(**check_arguments(PermutedConfig, table, {}, "objective")))
        nll, count = permuted_nll(self.model.inner, first_epoch(orders))  # type: ignore[arg-type,union-attr]
        values = {"loss": nll / count, "perplexity": math.exp(min(nll / count, 700))}
        result = {"scores": {name: values[name] for name in metrics}, "signatures": {}, "seconds": {}}
        return result | {"counts": {"examples": len(rows), "tokens": count}}


def eval_orders(text: np.ndarray, context: int, orderly: PermutedConfig) -> PermutedBatches:
    """Return the batches for an evaluation on a text."""
    if len(text) < 3:
        raise UserError(f"a text of {len(text)} tokens is too short to tell how good a model is")
    context = min(context, len(text) - 1)
    rows = max(1, min(BUDGET // context, len(text) // (4 * context)))
    return PermutedBatches(StreamBatches(text, context, rows, 0), orderly.every, 0)


class PermutedText(Text):
    objective_name = "permuted"
    kind = "encoder"
    predictor = PermutedRun

    def set_metrics(self, names: Sequence[str]) -> None:
        self.orderly = PermutedConfig(**check_arguments(PermutedConfig, self.objective_args, {}, "objective"))
        super().set_metrics(names)

    def check_model(self, model: Model) -> None:
        super().check_model(model)
        check_model(model)

    def objective(self) -> Objective:
        return Permuted(self.settings.label_smoothing)

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Any:
        s = self.settings
        text = prepare_text(corpus.train, self.target, self.data_path("train.ids"), partial(tick, "preparing"))
        streams = StreamBatches(
            text, s.context_length, s.batch_size or max(s.batch_tokens // s.context_length, 1), s.seed
        )
        return PermutedBatches(streams, self.orderly.every, s.seed)

    def dev(self, model: Model, lines: CorpusSplit) -> Dev:
        text = prepare_text(lines, self.target, self.data_path("dev.ids"))
        orders = eval_orders(text, self.settings.context_length, self.orderly)
        return Dev(self.objective(), lambda: first_epoch(orders), self.make_predictor)  # type: ignore[arg-type]
