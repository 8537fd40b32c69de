"""Next-token prediction over consecutive segments of a long text: the state of the model after a segment is carried
into the next one, without gradients (truncated backpropagation through time).

    loss = - sum over t of log p(y_t | y_<t of this segment, the state after those before it)

Dai et al. 2019, "Transformer-XL", arXiv:1901.02860. Every mixer carries a state, so this works for
all models that step: Transformer-XL caches hidden states and projects them with the current weights, here keys and
values are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from regard.core import Context, Model, Pattern, State, UserError
from regard.core.mixer import map_tensors
from regard.data.batches import Batch

from .next_token import token_loss
from .objective import Loss

MAX_CAPACITY = 1 << 15  # positions, after which a state must not grow any more


class Segments:
    """smoothing: label smoothing."""

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing
        self.memory = CarriedState()

    def __call__(self, model: Model, batch: Batch) -> Loss:
        state = self.memory.state_for(batch, lambda rows: model.start(rows, required_capacity(model)))
        context = Context.after(state.lengths, batch.tokens.shape[1], valid=batch.valid)
        x, layers = model.stack.step(model.embed(batch.tokens, context), state.layers, context)
        self.memory.store(batch, State.of_new_buffers(state.lengths + context.lengths, layers))
        return Loss(*token_loss(model, x, context, batch.targets, self.smoothing), batch.count)

    def state(self) -> dict[str, Tensor]:
        return self.memory.tensors()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.memory = CarriedState(tensors)


class CarriedState:
    """The model state that is carried from one batch to the next, as long as the next batch continues where it ended.

    tensors: what `tensors` returned, to resume a run.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None):
        self.saved = dict(tensors or {})
        self.kept: State | None = None
        self.place = int(self.saved.pop("place", -1))  # where the next batch must start

    def state_for(self, batch: Batch, start: Callable[[int], State]) -> State:
        """Return the state with which to read a batch; `start` makes an empty one for a number of rows."""
        rows = len(batch.tokens)
        if self.saved:
            numbers = iter(range(len(self.saved)))
            shapes = start(int(self.saved["0"].shape[0]))
            self.kept = map_tensors(shapes, lambda old: self.saved[str(next(numbers))].to(old.device))
            self.saved = {}
        if (
            self.kept is None
            or not batch.stream_offset
            or batch.stream_offset != self.place
            or len(self.kept.lengths) != rows
        ):
            return start(rows)
        return self.kept

    def store(self, batch: Batch, state: State) -> None:
        self.kept, self.place = map_tensors(state, Tensor.detach), (batch.stream_offset or 0) + batch.tokens.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        if self.kept is None:
            return dict(self.saved) | ({"place": torch.tensor(self.place)} if self.saved else {})
        found: list[Tensor] = []
        map_tensors(self.kept, lambda tensor: found.append(tensor.clone()))
        return {"place": torch.tensor(self.place)} | {str(i): tensor for i, tensor in enumerate(found)}


def required_capacity(model: Model) -> int:
    """Return a capacity beyond which the state of the model never grows. A model whose state grows forever is
    refused."""
    if model.limit is not None:
        raise UserError(
            f"a text in segments has no maximum length, and the positions of this model end at {model.limit}"
        )
    capacity = 1024
    while model.cost(1, capacity).state != model.cost(1, 4 * capacity).state:
        capacity *= 4
        if capacity > MAX_CAPACITY:
            raise UserError(
                "the cache of this model grows forever in a text of segments: give its attention a "
                "pattern with a limited reach, such as 'causal & window(256)', or choose the objective next_token"
            )
    return capacity


@contextmanager
def memory_length(model: Model, positions: int) -> Iterator[None]:
    """Set the reach of the model's attention patterns to so many positions, except full attention, and restore it on
    exit."""
    changed = [m for m in model.modules() if isinstance(getattr(m, "pattern", None), Pattern)]
    before = [module.pattern for module in changed]
    try:
        for module in changed:
            module.pattern = module.pattern.reaching(positions)
        yield
    finally:
        for module, pattern in zip(changed, before, strict=True):
            module.pattern = pattern
