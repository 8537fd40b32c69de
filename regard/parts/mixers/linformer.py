"""Linformer: keys and values are projected over positions to a fixed number, so that the cost is linear in the length.

    y = softmax(q (E^T k)^T / sqrt(dim)) (F^T v)          E and F (length, rank), learned

Every position has its own weights in E and F, so the maximum length is fixed; a shorter sequence uses the first rows.
Each projected key depends on all positions, so there is no causal form.

Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.bases import AttentionMask
from regard.bases.cache import Cache
from regard.bases.multihead import MultiHead
from regard.core import Context, Cost, Growth, Norm, Place, UserError
from regard.errors import nearest

SHARES = ("none", "heads", "kv", "layers")


class Linformer(MultiHead):
    """length: maximum sequence length.
    rank:      number of projected keys and values.
    share:     "none": every head has its own E and F; "heads": all heads share E and F; "kv": and E is F; "layers": and
               all layers of the stack share it.
    kv_heads:  number of key and value heads, each shared by a group of query heads.
    dim:       channels of a head; None: width / heads.
    bias:      which of the projections q, k, v, o have a bias: True for all, False for none, or their letters.
    norm:      norm on the output of the heads, before the output projection.
    """

    streams = False  # type: ignore[assignment]
    examples = (
        {"length": 29, "rank": 5},
        {"length": 23, "rank": 7, "share": "none", "bias": "o"},
        {"length": 31, "rank": 3, "share": "heads", "kv_heads": 1},
        {"length": 29, "rank": 4, "share": "layers", "norm": "layer"},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        rank: int = 128,
        share: str = "kv",
        kv_heads: int | None = None,
        dim: int | None = None,
        bias: bool | str = True,
        norm: Norm | str | dict = "none",
        weight_dropout: float = 0.0,
        kernel: str = "auto",
        place: Place | None = None,
    ):
        super().__init__(
            width, heads, kv_heads, dim, pattern="everything", bias=bias, norm=norm, weight_dropout=weight_dropout,
            kernel=kernel,
        )  # fmt: skip
        if share not in SHARES:
            raise UserError(f"unknown share '{share}'{nearest(share, SHARES)}")
        if not 1 <= rank <= length:
            raise UserError(f"rank must lie between 1 and the length, {length}, not {rank}")
        self.limit, self.rank, self.share = length, rank, share
        shared = place.shared if place is not None and share == "layers" else {}
        name = ("linformer", length, rank)
        self.down_k = shared[name] if name in shared else shared.setdefault(name, self._new_projection())
        self.down_v = self._new_projection() if share in ("none", "heads") else self.down_k

    def _new_projection(self) -> nn.Parameter:
        """Return an initialized projection (kv_heads or 1, length, rank)."""
        assert self.limit is not None
        std = (2 / (self.limit + self.rank)) ** 0.5
        heads = self.kv_heads if self.share == "none" else 1
        return nn.Parameter(torch.empty(heads, self.limit, self.rank).normal_(std=std))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if context.pattern is not None:
            raise UserError("linformer sums over all positions, so it cannot follow a pattern given with the batch")
        if x.shape[1] > self.limit:
            raise UserError(f"linformer has {self.limit} positions, and the input {x.shape[1]}: raise its length")
        at = context.positions[:1] if context.from_start else context.positions
        keys, values = self.keys(x, at)
        keys, values = (
            self._project_positions(keys, self.down_k, context),
            self._project_positions(values, self.down_v, context),
        )
        mask = AttentionMask(self.pattern, at, torch.arange(self.rank, device=x.device)[None])
        return self.look(x, keys, values, mask, context.valid)

    def _project_positions(self, x: Tensor, down: Tensor, context: Context) -> Tensor:
        """Project x (batch, time, kv_heads, dim) over positions: (batch, rank, kv_heads, dim)."""
        if context.valid is not None:
            x = x.masked_fill(~context.valid[..., None, None], 0.0)
        down = down[:, : x.shape[1]]
        if len(down) == 1:
            return (down.mT @ x.flatten(2)).unflatten(-1, x.shape[2:])
        return torch.einsum("bnhd,hnk->bkhd", x, down)

    def start(self, context: Context, capacity: int) -> Cache:
        raise UserError("linformer needs the whole sequence at once, so it does not step")

    def step(self, x: Tensor, state: Cache, context: Context) -> tuple[Tensor, Cache]:
        return x, self.start(context, 0)

    def cost(self, length: int, past: int = 0) -> Cost:
        weights = sum(m.weight.numel() for m in (self.q, self.k, self.v, self.out))
        attention = length * self.rank * 4 * self.heads * self.dim
        return Cost(2 * length * (weights + 2 * self.rank * self.kv_heads * self.dim) + attention, 0)

    def growth(self) -> Growth:
        return Growth(f"n·{self.rank}·d", "1", "1")
