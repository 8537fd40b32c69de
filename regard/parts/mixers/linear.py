"""Linear attention: without the softmax, all keys and values can be summed into one matrix per head. Attention becomes
a recurrence, at a cost that is linear in the length.

    o_t = f(q_t) S / f(q_t) z        S = sum of f(k_s) v_s^T,  z = sum of f(k_s), over s <= t, or over all s
    f(x) = elu(x) + 1

Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Cost, Growth, Mixer, UserError
from regard.errors import nearest
from regard.ops.activation import identity
from regard.ops.fading import (
    CHUNK,
    Summary,
    accumulation_dtype,
    empty_memory,
    flops,
    gated_linear_attention,
    head_dim,
    split_heads,
    with_ones,
)


def elu(x: Tensor) -> Tensor:
    return F.elu(x) + 1


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {"elu": elu, "relu": F.relu, "identity": identity}


class Linear(Mixer[Summary]):
    """Attention without a softmax. As an RNN its state is one matrix per head, of the same size at any length.

    dim:       channels of a query and a key; None: width / heads.
    value_dim: channels of a value; None: dim.
    feature:   the f above: "elu" (plus 1), "relu", or "identity" where queries and keys are already positive.
    causal:    sum over the past; otherwise over all positions, and the whole sequence is needed at once.
    bias:      the four projections have a bias.
    eps:       added to the divisor.
    """

    examples = (
        {},
        {"dim": 5, "value_dim": 7, "feature": "relu", "bias": False},
        {"causal": False},
        {"causal": False, "dim": 7, "value_dim": 5},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int | None = None,
        value_dim: int | None = None,
        feature: str = "elu",
        causal: bool = True,
        bias: bool = True,
        eps: float = 1e-6,
    ):
        super().__init__()
        if feature not in FEATURES:
            raise UserError(f"unknown feature '{feature}'{nearest(feature, FEATURES)}")
        self.width, self.heads, self.causal, self.eps = width, heads, causal, eps
        self.dim = dim or head_dim(width, heads)
        self.value_dim, self.feature = value_dim or self.dim, FEATURES[feature]
        self.q, self.k = (nn.Linear(width, heads * self.dim, bias=bias) for _ in range(2))
        self.v = nn.Linear(width, heads * self.value_dim, bias=bias)
        self.out = nn.Linear(heads * self.value_dim, width, bias=bias)
        for linear in (self.q, self.k, self.v, self.out):
            nn.init.xavier_uniform_(linear.weight)
            if bias:
                nn.init.zeros_(linear.bias)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.causal

    def start(self, context: Context, capacity: int) -> Summary:
        like = torch.empty(context.positions.shape[0], self.heads, dtype=self.dtype, device=context.positions.device)
        return Summary(empty_memory(like, self.dim, self.value_dim + 1))

    def step(self, x: Tensor, state: Summary, context: Context) -> tuple[Tensor, Summary]:
        if not self.causal:
            raise UserError(
                "linear attention with causal = false needs the whole sequence at once, so it does not step"
            )
        y, state = self.attend_past(*self.project(x), state, context.valid)
        return self.out(y.transpose(1, 2).flatten(-2)), state

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.causal:
            return super().forward(x, context)
        y = self.attend_all(*self.project(x), context.valid)
        return self.out(y.transpose(1, 2).flatten(-2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each (batch, heads, time, dim)."""
        q, k, v = (split_heads(to(x), self.heads) for to in (self.q, self.k, self.v))
        return q, k, v

    def attend_past(
        self, q: Tensor, k: Tensor, v: Tensor, state: Summary | None, valid: Tensor | None
    ) -> tuple[Tensor, Summary]:
        """Return what each query reads from the past, (batch, heads, time, value_dim), and the new state."""
        q, k = (self.feature(t.to(accumulation_dtype(t.dtype))) for t in (q, k))
        y, matrix = gated_linear_attention(q, k, with_ones(v), None, state.matrix if state else None, valid)
        return self.divide(y).to(v.dtype), Summary(matrix)

    def attend_all(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """Return what each query reads from the whole sequence."""
        with torch.autocast(q.device.type, enabled=False):
            q, k = (self.feature(t.to(accumulation_dtype(t.dtype))) for t in (q, k))
            if valid is not None:
                k = k.masked_fill(~valid[:, None, :, None], 0.0)
            return self.divide(q @ (k.mT @ with_ones(v.to(k.dtype)))).to(v.dtype)

    def divide(self, y: Tensor) -> Tensor:
        """Divide the weighted sums by the sum of the weights: (..., value_dim + 1) -> (..., value_dim)."""
        return y[..., :-1] / (y[..., -1:] + self.eps)

    def cost(self, length: int, past: int = 0) -> Cost:
        key, value, weight = self.dim, self.value_dim + 1, self.q.weight
        projections = sum(m.weight.numel() for m in (self.q, self.k, self.v, self.out))
        if not self.causal:
            return Cost(2 * length * projections + 4 * length * self.heads * key * value, 0)
        products = flops(length, self.heads, key, value)
        return Cost(
            2 * length * projections + products, self.heads * key * value * accumulation_dtype(weight.dtype).itemsize
        )

    def growth(self) -> Growth:
        return Growth(f"n·{self.dim}·d", f"n/{CHUNK}" if self.causal else "1", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.v.weight, self.out.weight)
