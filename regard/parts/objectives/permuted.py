"""Permutation language modeling: the last tokens of a random order are each predicted from the tokens that come before
them in that order, wherever they are, and from the memory of the previous segment.

    loss = - sum over the last tokens z_t of an order z of log p(x_(z_t) | x_(z_<t), memory)

Yang et al. 2019, "XLNet", arXiv:1906.08237. The tokens that are not predicted all see each other, as in the
authors' code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core import Context, Model, Pattern, Pointwise, State, UserError
from regard.data.batches import Batch
from regard.data.orders import target_positions
from regard.schema import name_of

from .next_token import token_loss
from .objective import Loss
from .segments import CarriedState


@dataclass(frozen=True)
class PermutedConfig:
    """A recipe's [objective] with part = "permuted".

    every: one token in `every` is predicted, those that come last in the order.
    """

    every: int = 6

    def __post_init__(self) -> None:
        if self.every < 2:
            raise UserError(f"objective.every must be at least 2, so that some tokens are given, not {self.every}")


class Permuted:
    """smoothing: label smoothing."""

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing
        self.memory = CarriedState()

    def __call__(self, model: Model, batch: Batch) -> Loss:
        assert batch.pattern is not None
        state = self.memory.state_for(batch, lambda rows: initial_state(model, rows, batch.stream_offset or 0))
        at = target_positions(batch.pattern.ranks).to(batch.tokens.device)  # type: ignore[attr-defined]
        _, queries, after = query_positions(model, batch.tokens, at, state, pattern=batch.pattern)
        self.memory.store(batch, after)
        context = Context.begin(*at.shape, at.device)
        return Loss(*token_loss(model, queries, context, batch.targets, self.smoothing), batch.count)

    def state(self) -> dict[str, Tensor]:
        return self.memory.tensors()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.memory = CarriedState(tensors)


def initial_state(model: Model, rows: int, place: int = 0) -> State:
    """Return an empty state whose next token is at position `place`."""
    device = next(model.parameters()).device
    layers = model.stack.start(Context.begin(rows, 0, device), 0)
    return State.of_new_buffers(torch.full((rows,), place, device=device), layers)


def query_positions(
    model: Model,
    tokens: Tensor,
    at: Tensor,
    state: State,
    valid: Tensor | None = None,
    pattern: Pattern | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor, State]:
    """Read tokens (batch, n) and query the positions `at` (batch, m), counted from the first token. Return the hidden
    states of both before the head, (batch, n, width) and (batch, m, width), and the state after the tokens."""
    batch, n = tokens.shape
    given = torch.arange(n, device=tokens.device).expand(batch, n)
    real = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
    if segments is not None:
        segments = torch.cat((segments, segments.gather(1, at.clamp(max=n - 1))), 1)
    context = Context(
        state.lengths[:, None] + torch.cat((given, at), 1),
        torch.cat((real, torch.zeros_like(at, dtype=torch.bool)), 1),
        pattern=pattern,
        segments=segments,
    )
    x = model.embed(torch.cat((tokens, torch.full_like(at, -1)), 1), context)
    x, layers = model.stack.step(x, state.layers, context)
    return x[:, :n], x[:, n:], State.of_new_buffers(state.lengths + context.lengths, layers)


def check_model(model: Model) -> None:
    """Refuse a model that does not support query positions."""
    mixers = [mixer for layer in model.stack.layers for mixer in layer.mixers]  # type: ignore[union-attr,operator]
    unsupported = [mixer for mixer in mixers if not isinstance(mixer, Pointwise) and name_of(mixer) != "two_streams"]
    if unsupported or not hasattr(model.embed, "asked"):
        what = f"mixer '{name_of(unsupported[0])}'" if unsupported else f"embed '{name_of(model.embed)}'"
        raise UserError(
            f"{what} does not support query positions, which the objective permuted needs: start from the recipe "
            "xlnet, with the mixer two_streams and the embed asking"
        )


@torch.no_grad()
def permuted_nll(model: Model, batches: Iterable[Batch]) -> tuple[float, int]:
    """Return the sum of -log p of the predicted tokens, and their number."""
    device, objective, nll, count = next(model.parameters()).device, Permuted(), 0.0, 0
    for batch in batches:
        nll += float(objective(model, batch.to(device)).nll)
        count += batch.count
    return nll, count
