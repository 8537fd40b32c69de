"""The next token, in segments of a text that goes on: what the model remembers of a segment, its own state, is there
when it reads the next one. Nothing is learned through it.

    loss = - sum over t of log p(y_t | y_<t of this segment, the state after those before it)

Dai et al. 2019, "Transformer-XL", arXiv:1901.02860. Since every mixer carries on from its state, this is for all that
step: theirs keeps vectors and maps them to keys and values with today's weights, here keys and values are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from regard.core import Context, Model, Pattern, State, UserError
from regard.core.mixer import each
from regard.data.batches import Batch

from .next_token import of_tokens
from .objective import Loss

LONGEST = 1 << 15  # positions, after which a state must not grow any more


class Segments:
    """smoothing: of the labels."""

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing
        self.memory = Carried()

    def __call__(self, model: Model, batch: Batch) -> Loss:
        state = self.memory.before(batch, lambda rows: model.start(rows, enough(model)))
        context = Context.after(state.lengths, batch.tokens.shape[1], valid=batch.valid)
        x, layers = model.stack.step(model.embed(batch.tokens, context), state.layers, context)
        self.memory.keep(batch, State.of_new_buffers(state.lengths + context.lengths, layers))
        return Loss(*of_tokens(model, x, context, batch.targets, self.smoothing), batch.count)

    def state(self) -> dict[str, Tensor]:
        return self.memory.tensors()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.memory = Carried(tensors)


class Carried:
    """What is remembered from one batch to the next, as long as that goes on where it ended.

    tensors: what `tensors` gave, in a run that goes on.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None):
        self.saved = dict(tensors or {})
        self.kept: State | None = None
        self.place = int(self.saved.pop("place", -1))  # where the next batch must begin

    def before(self, batch: Batch, start: Callable[[int], State]) -> State:
        """The state that a batch is read with; `start` gives an empty one for so many rows."""
        rows = len(batch.tokens)
        if self.saved:
            numbers = iter(range(len(self.saved)))
            shapes = start(int(self.saved["0"].shape[0]))
            self.kept = each(shapes, lambda old: self.saved[str(next(numbers))].to(old.device))
            self.saved = {}
        if (
            self.kept is None
            or not batch.stream_offset
            or batch.stream_offset != self.place
            or len(self.kept.lengths) != rows
        ):
            return start(rows)
        return self.kept

    def keep(self, batch: Batch, state: State) -> None:
        self.kept, self.place = each(state, Tensor.detach), (batch.stream_offset or 0) + batch.tokens.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        if self.kept is None:
            return dict(self.saved) | ({"place": torch.tensor(self.place)} if self.saved else {})
        found: list[Tensor] = []
        each(self.kept, lambda tensor: found.append(tensor.clone()))
        return {"place": torch.tensor(self.place)} | {str(i): tensor for i, tensor in enumerate(found)}


def enough(model: Model) -> int:
    """A capacity with which a state has all the room that it will ever need; refuses a model that remembers more and
    more."""
    if model.limit is not None:
        raise UserError(f"a text in segments has no end, and the positions of this model reach only {model.limit}")
    capacity = 1024
    while model.cost(1, capacity).state != model.cost(1, 4 * capacity).state:
        capacity *= 4
        if capacity > LONGEST:
            raise UserError(
                "this model remembers all it has read, which never ends in a text of segments: give its attention a "
                "pattern that forgets, such as 'causal & window(256)', or choose the objective next_token"
            )
    return capacity


@contextmanager
def remembering(model: Model, positions: int) -> Iterator[None]:
    """Inside, the model's patterns reach so many positions back, those that do not see everything."""
    changed = [m for m in model.modules() if isinstance(getattr(m, "pattern", None), Pattern)]
    before = [module.pattern for module in changed]
    try:
        for module in changed:
            module.pattern = module.pattern.reaching(positions)
        yield
    finally:
        for module, pattern in zip(changed, before, strict=True):
            module.pattern = pattern
