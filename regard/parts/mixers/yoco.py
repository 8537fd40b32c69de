"""You only cache once: a first stack, cheap to cache, makes one set of keys and values, and all layers of a second
stack look at those.

    h    = first(x)                                          window attention, gated retention: a state of constant size
    K, V = W_k norm(h), W_v norm(h)                          the only cache that grows, one for the whole model
    y    = second(h), its attention:  softmax(Q K^T) V       Q from each layer

Sun et al. 2024, "You Only Cache Once: Decoder-Decoder Architectures for Language Models", arXiv:2405.05254.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.bases import AttentionMask
from regard.bases.cache import grow_slots, write
from regard.bases.multihead import MultiHead
from regard.core import (
    Context,
    Cost,
    Growth,
    Mixer,
    Norm,
    Pattern,
    Place,
    Pointwise,
    Position,
    Stack,
    UserError,
    part,
)
from regard.pattern.analysis import pairs
from regard.schema import make, name_of

CAUSAL = Pattern.parse("causal")


class Once(NamedTuple):
    """The states of both stacks, and the cache between them."""

    first: tuple
    keys: Tensor  # (batch, capacity + 1, kv_heads, dim); the last slot takes what is not real
    values: Tensor  # (batch, capacity + 1, kv_heads, dim)
    second: tuple


@dataclass(frozen=True)
class Served(Context):
    """The context of the second stack: with the keys and values that are there for all its layers, and who may look at
    which."""

    keys: Tensor | None = None  # (batch, m, kv_heads, dim)
    values: Tensor | None = None
    see: AttentionMask | None = None


class Yoco(Mixer[Once]):
    """Two stacks in a layer of their own: put it there alone, with wiring "plain".

    first:    the table of a stack (depth, layer, norm, ...) that streams.
    second:   likewise; in its layers the branch `mixer`, the look at the cache, is made here and not written.
    kv_heads: key and value heads of the cache, shared by groups of the second stack's heads; None: as many.
    dim:      channels of a head; None: width / heads.
    position: of the second stack's attention.
    norm:     on what keys and values are made of.
    bias:     of the maps to queries, keys, values, and out.
    """

    examples = (
        {
            "first": {"layer": {"mixer": {"part": "attention", "pattern": "causal & window(4)"}, "wiring": "pre"}},
            "second": {"depth": 2, "layer": {"feedforward": {"part": "glu", "hidden": 10}, "wiring": "pre"}},
            "kv_heads": 1,
        },
        {
            "first": {"layer": [{"mixer": "gru", "wiring": "pre"}], "depth": 2, "norm": "layer"},
            "second": {"layer": [{"wiring": "post"}], "depth": 3, "heads": 2, "share": "layers"},
            "position": "alibi",
            "dim": 6,
            "bias": True,
        },
    )

    def __init__(
        self,
        width: int,
        heads: int,
        first: dict,
        second: dict,
        kv_heads: int | None = None,
        dim: int | None = None,
        position: Position | str | dict = "rotary",
        norm: Norm | str | dict = "rms",
        bias: bool = False,
        dropout: float = 0.0,
        weight_dropout: float = 0.0,
        kernel: str = "auto",
    ):
        super().__init__()
        second = dict(second)
        heads_of_second = second.get("heads", heads)
        if dim is None and width % heads_of_second:
            raise UserError(f"width {width} is not divisible by {heads_of_second} heads: change one, or give dim")
        self.width, self.kv_heads = width, kv_heads or heads_of_second
        self.dim = dim or width // heads_of_second
        self.first = _stack("first", dict(first), width, heads, dropout)
        inherited = {"width": width, "heads": heads_of_second, "dim": self.dim}
        self.position = part(Position, position, **inherited)
        if self.position.acts("embed"):
            raise UserError(f"position '{name_of(self.position)}' acts on token vectors: name it in the embed")

        def look() -> Mixer:
            return Look(width, heads_of_second, self.kv_heads, self.dim, self.position, bias, weight_dropout, kernel)

        kinds = second.pop("layer", [])
        kinds = [kinds] if isinstance(kinds, dict) else list(kinds)
        if any("mixer" in kind for kind in kinds):
            raise UserError("'mixer' is made by yoco itself, the look at the cache: leave it out", ("second", "layer"))
        own = len(kinds) if second.get("share") == "layers" else second.get("depth", 1)
        second["layer"] = [{"mixer": look(), **kinds[i % len(kinds)]} for i in range(own)] if kinds else []
        self.second = _stack("second", second, width, heads, dropout)
        self.norm = part(Norm, norm, width=width)
        self.k, self.v = (nn.Linear(width, self.kv_heads * self.dim, bias=bias) for _ in range(2))
        for linear in (self.k, self.v):
            nn.init.xavier_uniform_(linear.weight)
            if bias:
                nn.init.zeros_(linear.bias)

    def cached(self, h: Tensor, at: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of h (batch, n, width): (batch, n, kv_heads, dim)."""
        h = self.norm(h, valid)
        k, v = (to(h).unflatten(-1, (self.kv_heads, self.dim)) for to in (self.k, self.v))
        return self.position.key(k.transpose(1, 2), at).transpose(1, 2), v

    def forward(self, x: Tensor, context: Context) -> Tensor:
        at = context.positions[:1] if context.from_start else context.positions
        h = self.first(x, context)
        k, v = self.cached(h, at, context.valid)
        pattern = CAUSAL if context.pattern is None else CAUSAL & context.pattern
        return self.second(h, _serve(context, k, v, AttentionMask(pattern, at, at, context.from_start)))

    def start(self, context: Context, capacity: int) -> Once:
        cache = (context.positions.shape[0], capacity + 1, self.kv_heads, self.dim)
        k, v = (torch.zeros(cache, dtype=self.dtype, device=context.positions.device) for _ in range(2))
        return Once(self.first.start(context, capacity), k, v, self.second.start(context, capacity))

    def step(self, x: Tensor, state: Once, context: Context) -> tuple[Tensor, Once]:
        count = max(context.last_position, 0) + 1
        keys, values = grow_slots(state.keys, count), grow_slots(state.values, count)
        room = keys.shape[1] - 1
        h, first = self.first.step(x, state.first, context)
        k, v = self.cached(h, context.positions, context.valid)
        slot = context.positions if context.valid is None else torch.where(context.valid, context.positions, room)
        k, v = write(keys, slot, k), write(values, slot, v)
        at = torch.arange(count, device=x.device)[None]  # whoever looks at a slot stands behind it, so it is real
        served = _serve(context, k[:, :count], v[:, :count], AttentionMask(CAUSAL, context.positions, at))
        y, second = self.second.step(h, state.second, served)
        return y, Once(first, k, v, second)

    def cost(self, length: int, past: int = 0) -> Cost:
        first, second = self.first.cost(length, past), self.second.cost(length, past)
        maps = self.k.weight.numel() + self.v.weight.numel()
        cache = 2 * (past + length + 1) * self.kv_heads * self.dim * self.k.weight.element_size()
        return Cost(first.flops + 2 * length * maps + second.flops, first.state + cache + second.state)

    def growth(self) -> Growth:
        return Growth("n²·d", "1", "1")


class Look(Pointwise):
    """Attention over keys and values that the context brings: only the queries and the way out are its own."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        dim: int,
        position: Position,
        bias: bool,
        weight_dropout: float,
        kernel: str,
    ):
        super().__init__()
        self.width = width
        self.attention = MultiHead(
            width,
            heads,
            kv_heads,
            dim,
            over="memory",
            position=position,
            project="qo",
            bias=bias,
            weight_dropout=weight_dropout,
            kernel=kernel,
            place=Place(memory=kv_heads * dim),
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        assert isinstance(context, Served)
        return self.attention.look(x, context.keys, context.values, context.see, context.valid)

    def cost(self, length: int, past: int = 0) -> Cost:
        inner, looks = self.attention.heads * self.attention.dim, pairs(CAUSAL, length, past)
        flops = 2 * length * 2 * self.width * inner + round(looks * 4 * inner)
        return Cost(flops + self.attention.position.flops(length, past + length, looks), 0)

    def value_path(self) -> Iterator[Tensor]:
        yield self.attention.out.weight


def _stack(name: str, table: dict, width: int, heads: int, dropout: float) -> Stack:
    inherited = {"width": width, "heads": heads, "dropout": dropout, "place": Place(decoder=table.get("depth", 1))}
    table.setdefault("depth", 1)
    try:
        stack = make(Stack, table, inherited, name)
        stack.check_streams()
    except UserError as error:
        raise error.inside(name) from error.__cause__
    if stack.width != width:
        raise UserError(f"turns width {width} into {stack.width}, and must keep it", (name,))
    return stack


def _serve(context: Context, keys: Tensor, values: Tensor, see: AttentionMask) -> Served:
    known = {field.name: getattr(context, field.name) for field in fields(Context)}
    return Served(**known, keys=keys, values=values, see=see)
