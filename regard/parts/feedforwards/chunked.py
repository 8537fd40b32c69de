"""A feed-forward computed in chunks of positions, so that its hidden activations never exist for the whole sequence.

    y = [f(x_1 .. x_s); f(x_(s+1) .. x_2s); ...]

Only the memory changes: the backward pass recomputes the activations of each chunk.

Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451, section 3.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.bases.segments import pieces
from regard.core import Context, Cost, Mixer, Norm, Pointwise, UserError, part


class Chunked(Pointwise):
    """feedforward: any pointwise feed-forward: "mlp", "glu", { part = "mlp", hidden = 64 }, ...
    size:           positions in a chunk.
    """

    examples = (
        {"size": 4},
        {"size": 3, "feedforward": {"part": "glu", "hidden": 10}},
        {"size": 64, "feedforward": {"part": "mlp", "hidden": 7, "norm": "layer", "hidden_dropout": 0.2}},
    )

    def __init__(self, width: int, feedforward: Mixer | str | dict = "mlp", size: int = 128):
        super().__init__()
        if size < 1:
            raise UserError(f"size must be at least 1, not {size}")
        self.width, self.size = width, size
        try:
            self.inner = part(Mixer, feedforward, width=width)
        except UserError as error:
            raise UserError(error.message, ("feedforward", *error.path[1:])) from error.__cause__
        if not isinstance(self.inner, Pointwise):
            raise UserError("chunked takes a pointwise feed-forward, which treats every position by itself")
        if any(isinstance(m, Norm) and list(m.buffers()) for m in self.inner.modules()):
            raise UserError("chunked cannot take a norm that gathers statistics over positions: use another norm")

    @property
    def out_width(self) -> int:
        return self.inner.out_width

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if x.shape[1] <= self.size:
            return self.inner(x, context)
        outputs = []
        for chunk in pieces(x, context, self.size):
            recompute = torch.is_grad_enabled()
            outputs.append(checkpoint(self.inner, *chunk, use_reentrant=False) if recompute else self.inner(*chunk))
        return torch.cat(outputs, 1)

    def cost(self, length: int, past: int = 0) -> Cost:
        return self.inner.cost(length, past)

    def value_path(self) -> Iterator[Tensor]:
        yield from self.inner.value_path()
