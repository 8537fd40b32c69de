"""An ensemble of models: the mean of their next-token probabilities is often better than each alone.

    p(next token) = mean over the models of p_m(next token)

Each model has its own state, so the ensemble obeys the same law as each model. Of networks: Hansen and Salamon
1990, "Neural Network Ensembles"; for sequences, Sutskever et al. 2014, arXiv:1409.3215.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.core import Context, Cost, Head, Memory, Model, UserError
from regard.ops.dispatch import hooked

from .result import at_least_float32
from .session import session


class EnsembleMemory(NamedTuple):
    """The encoder outputs of all models."""

    per_model: tuple[Memory, ...]

    @property
    def x(self) -> Tensor:
        return self.per_model[0].x


class Ensemble(nn.Module):
    """models: of one kind and vocabulary. The hidden vectors before the head are those of all models, concatenated."""

    def __init__(self, models: Sequence[Model]):
        super().__init__()
        if not models:
            raise UserError("an ensemble needs at least one model")
        first = models[0]
        for other in models[1:]:
            if (other.kind, other.vocab, other.source_vocab) != (first.kind, first.vocab, first.source_vocab):
                raise UserError(
                    "the models of an ensemble must be of one kind and have the same vocabulary; these do not"
                )
        self.models = nn.ModuleList(models)
        self.steppers: list[Any] = []  # the sessions of the models, in a session of the ensemble
        self.kind, self.vocab, self.source_vocab = first.kind, first.vocab, first.source_vocab
        self.recipe = getattr(first, "recipe", {})
        self.limit, self.source_limit = (_least(models, name) for name in ("limit", "source_limit"))

    @property
    def head(self) -> Head:
        return _Mean(self)

    def encode(self, source: Tensor, valid: Tensor | None = None) -> EnsembleMemory:
        return EnsembleMemory(tuple(model.encode(source, valid) for model in self._each))

    def forward(
        self,
        tokens: Tensor,
        valid: Tensor | None = None,
        source: Tensor | None = None,
        source_valid: Tensor | None = None,
        memory: EnsembleMemory | None = None,
    ) -> Tensor:
        """tokens (batch, time) -> log p (batch, time, vocab)."""
        memory = self.encode(source, source_valid) if source is not None else memory
        pairs = zip(self._each, self._apart(memory), strict=True)
        return mean_logprobs([model(tokens, valid, memory=own) for model, own in pairs])

    def hidden(self, tokens: Tensor, context: Context) -> Tensor:
        """Return the hidden vectors (batch, time, sum of widths)."""
        contexts = [replace(context, memory=own, cache={}) for own in self._apart(context.memory)]
        return torch.cat([model.hidden(tokens, own) for model, own in zip(self._each, contexts, strict=True)], -1)

    def start(self, batch: int, capacity: int, *, memory: EnsembleMemory | None = None) -> tuple:
        pairs = zip(self._stepping, self._apart(memory), strict=True)
        return tuple(model.start(batch, capacity, memory=own) for model, own in pairs)

    def step(self, tokens: Tensor, state: tuple, valid: Tensor | None = None) -> tuple[Tensor, tuple]:
        scores, states = self._all(lambda model, own: model.step(tokens, own, valid), state)
        return mean_logprobs(scores), states

    def last_hidden(self, tokens: Tensor, state: tuple, valid: Tensor | None = None) -> tuple[Tensor, tuple]:
        x, states = self._all(lambda model, own: model.last_hidden(tokens, own, valid), state)
        return torch.cat(x, -1), states

    def reorder(self, state: tuple, rows: Tensor) -> tuple:
        return tuple(model.reorder(own, rows) for model, own in zip(self._stepping, state, strict=True))

    def logits(self, x: Tensor) -> Tensor:
        """x (rows, sum of widths) -> log p (rows, vocab)."""
        return mean_logprobs([model.logits(own) for model, own in zip(self._stepping, self.split(x), strict=True)])

    def logits_for(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        makers = [model.logits_for(tokens) for model in self._stepping]
        return lambda x: mean_logprobs([make(own) for make, own in zip(makers, self.split(x), strict=True)])

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the vectors of each model."""
        return x.split([model.stack.width for model in self._each], -1)

    def cost(self, length: int, past: int = 0) -> Cost:
        costs = [model.cost(length, past) for model in self._each]
        return Cost(sum(cost.flops for cost in costs), sum(cost.state for cost in costs))

    @property
    def is_hooked(self) -> bool:
        """Whether hooks want the logits of every step."""
        return hooked(self)

    def session(self) -> Ensemble:
        """Return the same ensemble with a decoding session for each model."""
        made = copy.copy(self)
        made.steppers = [session(model) for model in self._each]
        return made

    @property
    def _stepping(self) -> list[Any]:
        return self.steppers or self._each

    @property
    def _each(self) -> list[Model]:
        return list(self.models)  # type: ignore[arg-type]

    def _apart(self, memory: Any) -> Sequence[Memory | None]:
        return [None] * len(self.models) if memory is None else memory.per_model

    def _all(self, step: Callable[[Model, Any], tuple[Tensor, Any]], state: tuple) -> tuple[list[Tensor], tuple]:
        if len(state) != len(self.models):
            raise UserError(f"a state of {len(state)} models cannot continue with {len(self.models)}")
        outputs, states = zip(
            *(step(model, own) for model, own in zip(self._stepping, state, strict=True)), strict=True
        )
        return list(outputs), states


class _Mean(Head):
    """The ensemble's head, for objectives: concatenated vectors -> log p."""

    def __init__(self, ensemble: Ensemble):
        super().__init__()
        self._parts = lambda x: zip([model.head for model in ensemble._each], ensemble.split(x), strict=True)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return mean_logprobs([head(own, context) for head, own in self._parts(x)])


def mean_logprobs(scores: Sequence[Tensor]) -> Tensor:
    """Return the log of the mean of softmax(scores) over the models, (..., vocab)."""
    logs = torch.stack([at_least_float32(one).log_softmax(-1) for one in scores])
    return logs.logsumexp(0) - math.log(len(logs))


def _least(models: Sequence[Model], name: str) -> int | None:
    return min((getattr(model, name) for model in models if getattr(model, name) is not None), default=None)
