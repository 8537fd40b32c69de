"""Tokens in a random order: each of the last ones is predicted from the others that come before it in that order,
wherever they stand, and from what is remembered of the segment before.

    loss = - sum over the last tokens z_t of an order z of log p(x_(z_t) | x_(z_<t), memory)

Yang et al. 2019, "XLNet", arXiv:1906.08237. The first tokens of the order all see each other, as in the authors' code.
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

from .next_token import of_tokens
from .objective import Loss
from .segments import Carried


@dataclass(frozen=True)
class Orderly:
    """A recipe's [objective] with part = "permuted".

    every: one token in so many is predicted, those that come last in the order.
    """

    every: int = 6

    def __post_init__(self) -> None:
        if self.every < 2:
            raise UserError(f"objective.every must be at least 2, so that something is known, not {self.every}")


class Permuted:
    """smoothing: of the labels."""

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing
        self.memory = Carried()

    def __call__(self, model: Model, batch: Batch) -> Loss:
        assert batch.pattern is not None
        state = self.memory.before(batch, lambda rows: begin(model, rows, batch.stream_offset or 0))
        at = target_positions(batch.pattern.ranks).to(batch.tokens.device)  # type: ignore[attr-defined]
        _, asked, after = ask(model, batch.tokens, at, state, pattern=batch.pattern)
        self.memory.keep(batch, after)
        context = Context.begin(*at.shape, at.device)
        return Loss(*of_tokens(model, asked, context, batch.targets, self.smoothing), batch.count)

    def state(self) -> dict[str, Tensor]:
        return self.memory.tensors()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.memory = Carried(tensors)


def begin(model: Model, rows: int, place: int = 0) -> State:
    """Nothing is remembered; the next token stands at `place`."""
    device = next(model.parameters()).device
    layers = model.stack.start(Context.begin(rows, 0, device), 0)
    return State.of_new_buffers(torch.full((rows,), place, device=device), layers)


def ask(
    model: Model,
    tokens: Tensor,
    at: Tensor,
    state: State,
    valid: Tensor | None = None,
    pattern: Pattern | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor, State]:
    """tokens (batch, n) are told, and the places `at` (batch, m), counted from the first of them, asked about: the
    vectors of both before the head, (batch, n, width) and (batch, m, width), and the state after the tokens."""
    batch, n = tokens.shape
    told = torch.arange(n, device=tokens.device).expand(batch, n)
    real = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
    if segments is not None:
        segments = torch.cat((segments, segments.gather(1, at.clamp(max=n - 1))), 1)
    context = Context(
        state.lengths[:, None] + torch.cat((told, at), 1),
        torch.cat((real, torch.zeros_like(at, dtype=torch.bool)), 1),
        pattern=pattern,
        segments=segments,
    )
    x = model.embed(torch.cat((tokens, torch.full_like(at, -1)), 1), context)
    x, layers = model.stack.step(x, state.layers, context)
    return x[:, :n], x[:, n:], State.of_new_buffers(state.lengths + context.lengths, layers)


def fits(model: Model) -> None:
    """Refuses a model that cannot be asked about a place."""
    mixers = [mixer for layer in model.stack.layers for mixer in layer.mixers]  # type: ignore[union-attr,operator]
    strange = [mixer for mixer in mixers if not isinstance(mixer, Pointwise) and name_of(mixer) != "two_streams"]
    if strange or not hasattr(model.embed, "asked"):
        what = f"mixer '{name_of(strange[0])}'" if strange else f"embed '{name_of(model.embed)}'"
        raise UserError(
            f"{what} does not know rows that only ask, as the objective permuted needs: begin from the recipe xlnet, "
            "with the mixer two_streams and the embed asking"
        )


@torch.no_grad()
def measured(model: Model, batches: Iterable[Batch]) -> tuple[float, int]:
    """The sum of -log p of the tokens asked for, and their number."""
    device, objective, nll, count = next(model.parameters()).device, Permuted(), 0.0, 0
    for batch in batches:
        nll += float(objective(model, batch.to(device)).nll)
        count += batch.count
    return nll, count
