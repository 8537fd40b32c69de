"""You only cache once: a first stack with a small cache produces one set of keys and values, and all layers of a second
stack attend to those.

    h    = first(x)                                          window attention, gated retention: a state of constant size
    K, V = W_k norm(h), W_v norm(h)                          the only cache that grows, one for the whole model
    y    = second(h), its attention:  softmax(Q K^T) V       Q from each layer

Sun et al. 2024, "You Only Cache YocoState: Decoder-Decoder Architectures for Language Models", arXiv:2405.05254.
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


class YocoState(NamedTuple):
    """The states of both stacks, and the cache between them."""

    first: tuple
    keys: Tensor  # (batch, capacity + 1, kv_heads, dim); the last slot is for padding
    values: Tensor  # (batch, capacity + 1, kv_heads, dim)
    second: tuple


@dataclass(frozen=True)
class SharedKeysContext(Context):
    """The context of the second stack, with the keys and values that all its layers share, and the attention mask."""

    keys: Tensor | None = None  # (batch, m, kv_heads, dim)
    values: Tensor | None = None
    mask: AttentionMask | None = None


class Yoco(Mixer[YocoState]):
    """Two stacks inside one mixer: use it alone in a layer, with wiring "plain".

    first:    table of the first stack (depth, layer, norm, ...), which must stream.
    second:   table of the second stack; the branch `mixer` of its layers, the attention over the cache, is added here.
    kv_heads: number of key and value heads, each shared by a group of the second stack's heads; None: as many.
    dim:      channels of a head; None: width / heads.
    position: position of the attention of the second stack.
    norm:     norm before the key and value projections.
    bias:     the projections to queries, keys, values, and output have a bias.
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

        def attention() -> Mixer:
            return SharedKeysAttention(
                width, heads_of_second, self.kv_heads, self.dim, self.position, bias, weight_dropout, kernel
            )

        kinds = second.pop("layer", [])
        kinds = [kinds] if isinstance(kinds, dict) else list(kinds)
        if any("mixer" in kind for kind in kinds):
            raise UserError(
                "'mixer' is the attention over the cache, which yoco adds itself: leave it out", ("second", "layer")
            )
        own = len(kinds) if second.get("share") == "layers" else second.get("depth", 1)
        second["layer"] = [{"mixer": attention(), **kinds[i % len(kinds)]} for i in range(own)] if kinds else []
        self.second = _stack("second", second, width, heads, dropout)
        self.norm = part(Norm, norm, width=width)
        self.k, self.v = (nn.Linear(width, self.kv_heads * self.dim, bias=bias) for _ in range(2))
        for linear in (self.k, self.v):
            nn.init.xavier_uniform_(linear.weight)
            if bias:
                nn.init.zeros_(linear.bias)

    def keys_values(self, h: Tensor, at: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return keys and values (batch, n, kv_heads, dim) of h (batch, n, width)."""
        h = self.norm(h, valid)
        k, v = (to(h).unflatten(-1, (self.kv_heads, self.dim)) for to in (self.k, self.v))
        return self.position.key(k.transpose(1, 2), at).transpose(1, 2), v

    def forward(self, x: Tensor, context: Context) -> Tensor:
        at = context.positions[:1] if context.from_start else context.positions
        h = self.first(x, context)
        k, v = self.keys_values(h, at, context.valid)
        pattern = CAUSAL if context.pattern is None else CAUSAL & context.pattern
        return self.second(h, _with_keys(context, k, v, AttentionMask(pattern, at, at, context.from_start)))

    def start(self, context: Context, capacity: int) -> YocoState:
        cache = (context.positions.shape[0], capacity + 1, self.kv_heads, self.dim)
        k, v = (torch.zeros(cache, dtype=self.dtype, device=context.positions.device) for _ in range(2))
        return YocoState(self.first.start(context, capacity), k, v, self.second.start(context, capacity))

    def step(self, x: Tensor, state: YocoState, context: Context) -> tuple[Tensor, YocoState]:
        count = max(context.last_position, 0) + 1
        keys, values = grow_slots(state.keys, count), grow_slots(state.values, count)
        last_slot = keys.shape[1] - 1
        h, first = self.first.step(x, state.first, context)
        k, v = self.keys_values(h, context.positions, context.valid)
        slot = context.positions if context.valid is None else torch.where(context.valid, context.positions, last_slot)
        k, v = write(keys, slot, k), write(values, slot, v)
        at = torch.arange(count, device=x.device)[None]  # a causal query sees only slots that are filled
        shared = _with_keys(context, k[:, :count], v[:, :count], AttentionMask(CAUSAL, context.positions, at))
        y, second = self.second.step(h, state.second, shared)
        return y, YocoState(first, k, v, second)

    def cost(self, length: int, past: int = 0) -> Cost:
        first, second = self.first.cost(length, past), self.second.cost(length, past)
        projections = self.k.weight.numel() + self.v.weight.numel()
        cache = 2 * (past + length + 1) * self.kv_heads * self.dim * self.k.weight.element_size()
        return Cost(first.flops + 2 * length * projections + second.flops, first.state + cache + second.state)

    def growth(self) -> Growth:
        return Growth("n²·d", "1", "1")


class SharedKeysAttention(Pointwise):
    """Attention over the keys and values in the context: only the query and output projections are its own."""

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
        assert isinstance(context, SharedKeysContext)
        return self.attention.look(x, context.keys, context.values, context.mask, context.valid)

    def cost(self, length: int, past: int = 0) -> Cost:
        inner, attended = self.attention.heads * self.attention.dim, pairs(CAUSAL, length, past)
        flops = 2 * length * 2 * self.width * inner + round(attended * 4 * inner)
        return Cost(flops + self.attention.position.flops(length, past + length, attended), 0)

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
        raise UserError(f"changes width {width} to {stack.width}, and must keep it", (name,))
    return stack


def _with_keys(context: Context, keys: Tensor, values: Tensor, mask: AttentionMask) -> SharedKeysContext:
    inherited_fields = {field.name: getattr(context, field.name) for field in fields(Context)}
    return SharedKeysContext(**inherited_fields, keys=keys, values=values, mask=mask)
