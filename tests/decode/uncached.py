"""Decoding without a cache: a model that reads everything again at every step, behind the face of one that steps."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import Memory, Model


class Tokens(NamedTuple):
    """All that there is so far. `select` works on it."""

    tokens: Tensor  # (batch, capacity)
    lengths: Tensor  # (batch,)
    memory: Memory | None


class Uncached:
    def __init__(self, model: Model):
        self.model = model

    def start(self, batch: int, capacity: int, *, memory: Memory | None = None) -> Tokens:
        return Tokens(torch.zeros(batch, capacity, dtype=torch.long), torch.zeros(batch, dtype=torch.long), memory)

    def step(self, tokens: Tensor, state: Tokens, valid: Tensor | None = None) -> tuple[Tensor, Tokens]:
        taken = torch.full_like(state.lengths, tokens.shape[1]) if valid is None else valid.sum(1)
        whole = state.tokens.clone()
        for row, (begin, count) in enumerate(zip(state.lengths.tolist(), taken.tolist(), strict=True)):
            whole[row, begin : begin + count] = tokens[row, :count]
        lengths = state.lengths + taken
        seen = int(lengths.max())
        real = torch.arange(seen)[None] < lengths[:, None]
        scores = self.model(whole[:, :seen], real, memory=state.memory)
        at = (state.lengths[:, None] + torch.arange(tokens.shape[1])).clamp(max=seen - 1)
        new = scores.gather(1, at[..., None].expand(-1, -1, scores.shape[-1]))
        return new, Tokens(whole, lengths, state.memory)
