"""Performer: an approximation of softmax attention by random features, in linear time.

    softmax(q K^T / sqrt(dim)) V  ~  f(q) (f(K)^T V) / f(q) f(K)^T 1         f: see regard/bases/favor.py

Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv:2009.14794.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.bases.favor import Favor, Seen
from regard.core import Context, Cost, Growth, Mixer, Place, Position, UserError, part
from regard.ops.fading import CHUNK, accumulation_dtype, flops, head_dim, split_heads
from regard.schema import name_of


class Performer(Mixer[Seen]):
    """dim:   channels of a head; None: width / heads.
    features: number of random features; None: dim times its logarithm.
    feature:  "softmax" (approximates softmax attention) or "relu" (another kernel).
    causal:   sum over the past; otherwise over all positions, and the whole sequence is needed at once.
    position: position that acts on queries and keys: rotary, ...
    bias:     the four projections have a bias.
    eps:      added to every feature; None: 1e-4 for softmax and 1e-3 for relu, as in the original.
    seed:     seed of the random features.
    redraw:   number of training calls after which the features are redrawn; 0: never.
    """

    examples = (
        {},
        {"feature": "relu", "features": 11, "bias": False},
        {"dim": 6, "features": 5, "position": "rotary", "eps": 0.0, "redraw": 2},
        {"causal": False},
        {"causal": False, "feature": "relu", "dim": 5},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int | None = None,
        features: int | None = None,
        feature: str = "softmax",
        causal: bool = True,
        position: Position | str | dict = "none",
        bias: bool = True,
        eps: float | None = None,
        seed: int = 0,
        redraw: int = 0,
        place: Place | None = None,
    ):
        super().__init__()
        self.width, self.heads, self.causal = width, heads, causal
        self.dim = dim or head_dim(width, heads)
        features = max(1, int(self.dim * math.log(self.dim))) if features is None else features
        self.favor = Favor(self.dim, features, feature, eps, seed, place.index if place else 0, redraw)
        self.position = part(Position, position, width=width, heads=heads, dim=self.dim)
        if any(self.position.acts(place) for place in ("embed", "bias", "output_bias")):
            raise UserError(
                f"position '{name_of(self.position)}' does not act on queries and keys only: choose another"
            )
        self.q, self.k, self.v = (nn.Linear(width, heads * self.dim, bias=bias) for _ in range(3))
        self.out = nn.Linear(heads * self.dim, width, bias=bias)
        for linear in (self.q, self.k, self.v, self.out):
            nn.init.xavier_uniform_(linear.weight)
            if bias:
                nn.init.zeros_(linear.bias)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.causal

    def start(self, context: Context, capacity: int) -> Seen:
        return self.favor.start(
            torch.empty(context.positions.shape[0], self.heads, dtype=self.dtype, device=context.positions.device)
        )

    def step(self, x: Tensor, state: Seen, context: Context) -> tuple[Tensor, Seen]:
        if not self.causal:
            raise UserError("a performer with causal = false needs the whole sequence at once, so it does not step")
        y, state = self.favor.recall(*self._project_in(x, context), state, context.valid)
        return self._project_out(y), state

    def forward(self, x: Tensor, context: Context) -> Tensor:
        self.favor.renew()
        if self.causal:
            return super().forward(x, context)
        return self._project_out(self.favor.everything(*self._project_in(x, context), context.valid))

    def _project_in(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each (batch, heads, time, dim)."""
        q, k, v = (split_heads(to(x), self.heads) for to in (self.q, self.k, self.v))
        at = context.positions[:1] if context.from_start else context.positions
        return self.position.query(q, at), self.position.key(k, at), v

    def _project_out(self, y: Tensor) -> Tensor:
        return self.out(y.transpose(1, 2).flatten(-2))

    def cost(self, length: int, past: int = 0) -> Cost:
        key, value = self.favor.features, self.dim + 1
        projections = (
            sum(m.weight.numel() for m in (self.q, self.k, self.v, self.out)) + 2 * self.heads * self.dim * key
        )
        if not self.causal:
            return Cost(2 * length * projections + 4 * length * self.heads * key * value, 0)
        kept = self.heads * (key * value + (self.favor.kind == "softmax"))
        products = flops(length, self.heads, key, value)
        return Cost(2 * length * projections + products, kept * accumulation_dtype(self.dtype).itemsize)

    def growth(self) -> Growth:
        return Growth(f"n·{self.favor.features}·d", f"n/{CHUNK}" if self.causal else "1", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.v.weight, self.out.weight)
