"""Calls of decode.cpp: linear layers for few rows, attention over a cache, a step of a whole stack, and top-k
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from itertools import accumulate

import torch
from torch import Tensor

from .build import Kernels, threads_for
from .structs import AttentionArgs, FusedBranch, LinearParams, NormParams, SearchArgs, Workspace


def linear_params(
    weight: Tensor,
    bias: Tensor | None,
    packed: Tensor | None = None,
    scale: Tensor | None = None,
    sums: Tensor | None = None,
) -> LinearParams:
    """Return the struct of a linear layer with contiguous weights (out, in).

    packed: the same weights from `pack_matrix`, for many rows. scale, sums: of each output, for int8 weights.
    """
    out, wide = weight.shape
    bias = None if bias is None else bias.contiguous()
    tensors = (weight, bias, packed, scale, sums)
    made = LinearParams(*[None if t is None else t.data_ptr() for t in tensors], wide, out)
    made.held = tensors
    return made


def workspace(kernels: Kernels, x: Tensor, wide: int) -> Tensor:
    """Return scratch memory for products of the rows x with up to `wide` channels."""
    return torch.empty((x.shape[0] + kernels.rows) * (wide + 1) * x.element_size(), dtype=torch.uint8)


def apply(kernels: Kernels, map: LinearParams, x: Tensor) -> Tensor:
    """x (rows, in), contiguous -> (rows, out)"""
    y = x.new_empty(x.shape[0], map.out)
    scratch = workspace(kernels, x, map.wide) if map.scale or map.packed else None
    kernels.named["apply", x.dtype](
        map, x.data_ptr(), y.data_ptr(), x.shape[0], None if scratch is None else scratch.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return y


ACTIVATIONS = ("identity", "relu", "gelu", "gelu_tanh", "silu")  # in the order of decode.cpp


def attend(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, held: Tensor | None = None
) -> Tensor:
    """q (batch, heads, n, dim), k and v (rows, kv_heads, m, dim), channels contiguous -> (batch, n, heads, dim).

    added: a bool mask or a float added to the scores, broadcastable to (batch, heads, n, m).
    held:  (batch, m or more) the row of k and v that holds each key; None: each row its own.
    """
    batch, heads, queries, dim = q.shape
    _, groups, keys, wide = v.shape
    cores = threads_for(q.numel() * keys)
    y, scores = q.new_empty(batch, queries, heads, wide), q.new_empty(_scores(heads, keys, cores, q.element_size()))
    steps: Sequence[int] = (0, 0, 0, 0)
    if added is not None:
        added = added.expand(batch, heads, queries, keys)
        steps = added.stride()
    kernels.named["attend", q.dtype](
        AttentionArgs(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), None if added is None else added.data_ptr(),
            None if held is None else held.data_ptr(), y.data_ptr(), scores.data_ptr(), batch, heads, groups, queries,
            keys, dim, wide, added is not None and added.dtype == torch.bool, 0 if held is None else held.stride(0),
            cores, q.stride()[:3], k.stride()[:3], v.stride()[:3], steps, 1.0,
        )
    )  # fmt: skip
    return y


def _scores(heads: int, keys: int, cores: int, size: int) -> int:
    """Return the elements of `size` bytes that attention needs for its scores."""
    return cores * heads * (keys + 64 // size)


def plan_mlp(
    into: LinearParams, out: LinearParams, activation: str, rows: int, gated: LinearParams | None = None
) -> FusedBranch:
    """Return the branch of an MLP, gated where `gated` is given."""
    made = FusedBranch(first=addressof(into), last=addressof(out), how=ACTIVATIONS.index(activation))
    if gated is not None:
        made.key = addressof(gated)
    made.maps, made.work, made.leaves = (into, out, gated), into.wide * into.out, out.out
    made.wants = [rows * into.out, rows * into.out if gated else 0, 0, max(into.wide, into.out)]
    return made


RotaryTables = tuple[
    Tensor, Tensor, bool
]  # cos and sin (rows or 1, pairs), and whether pairs lie half the channels apart


def plan_attention(
    maps: Sequence[LinearParams | None], rows: int, k: Tensor, v: Tensor, slot: int, scale: float, added: Tensor | None,
    held: Tensor | None, keys: int, queries: int = 1, rotary_tables: RotaryTables | None = None,
) -> FusedBranch:  # fmt: skip
    """Return the branch of attention at the next position of each row.

    maps: the projections to queries, keys and values, and the output projection; without those to keys and values,
        k and v (stored, m, kv_heads, dim) stay as they are, and `queries` rows attend to each stored row.
    slot: where the new keys and values are written. keys: the first so many slots are attended to.
    """
    first, key, value, last = maps
    assert first is not None
    assert last is not None
    (row, place, head, _), (v_row, v_place, v_head, _) = k.stride(), v.stride()
    (groups, dim), out, wide, size = k.shape[2:], first.out, v.shape[3], k.element_size()
    looks = AttentionArgs(
        k=k.data_ptr(), v=v.data_ptr(), batch=rows // queries, heads=out // dim, groups=groups, queries=queries,
        dim=dim, value_dim=wide, q_step=(queries * out, dim, out), k_step=(row, head, place),
        v_step=(v_row, v_head, v_place), scale=scale,
    )  # fmt: skip
    made = FusedBranch(looks, first=addressof(first), last=addressof(last), attends=1)
    if key is not None and value is not None:
        made.key, made.value = addressof(key), addressof(value)
    made.maps, made.work, made.leaves = maps, first.wide * out, last.out
    made.slots = (looks.k, looks.v, place * size, v_place * size)
    made.wants = [rows * out, rows * last.wide, 0, max(first.wide, last.wide)]
    made.size, made.looked = size, (rows // queries, out // dim, queries)
    update_attention(made, slot, added, held, keys, rotary_tables)
    return made


def update_attention(
    made: FusedBranch,
    slot: int,
    added: Tensor | None,
    held: Tensor | None,
    keys: int,
    rotary_tables: RotaryTables | None = None,
) -> None:
    """Change the branch of `plan_attention` for another position of the same rows, with the same cache buffers."""
    looks, (batch, heads, queries) = made.looks, made.looked
    k, v, step, v_step = made.slots
    if added is not None:
        added = added.expand(batch, heads, queries, keys)
        looks.added_step = added.stride()
    looks.added = None if added is None else added.data_ptr()
    looks.hides = added is not None and added.dtype == torch.bool
    if held is not None:
        looks.held_step = held.stride(0)
    looks.held = None if held is None else held.data_ptr()
    looks.keys, looks.threads = keys, threads_for(made.wants[0] * keys)
    made.key_slot, made.value_slot = k + slot * step, v + slot * v_step
    if rotary_tables is not None:
        cos, sin, halves = rotary_tables
        rows, made.pairs = cos.shape
        made.cos, made.sin, made.halves = cos.data_ptr(), sin.data_ptr(), halves
        made.pairs_step = made.pairs if rows > 1 else 0
    made.beside = (added, held, rotary_tables)
    made.wants[2] = _scores(heads, keys, looks.threads, made.size)


class Program:
    """A sequence of branches for one kernel call. With norms, each is a residual branch between a norm before and one
    after it, and there may be a last norm; without norms, there is a single plain branch."""

    def __init__(
        self,
        branches: Sequence[FusedBranch],
        norms: Sequence[Sequence[NormParams | None]] = (),
        end: NormParams | None = None,
    ):
        self.norms, self.end = norms, end
        for one, (before, after) in zip(branches, norms, strict=False):
            one.adds, one.before, one.after = 1, before and addressof(before), after and addressof(after)
        self.every = (FusedBranch * len(branches))(*branches)
        self.branches = list(self.every)  # views into the array
        for new, old in zip(self.branches, branches, strict=True):
            vars(new).update(vars(old))
        self.work = sum(one.work for one in branches)

    def run(self, kernels: Kernels, x: Tensor) -> Tensor:
        """Run all branches on contiguous x (rows, width)."""
        rows, wide = x.shape
        y, last = x.new_empty(rows, self.branches[-1].leaves), self.end
        room = self._workspace(kernels, rows, wide, x.element_size())
        kernels.named["run", x.dtype](
            self.every, len(self.branches), last and addressof(last), x.data_ptr(), y.data_ptr(), room, rows, wide,
            threads_for(self.work * max(rows // 16, 1)),
        )  # fmt: skip
        return y

    def search(
        self, kernels: Kernels, held: Tensor, steps: int, first: int, end: int, table: Tensor, scale: float,
        added: Tensor, output: LinearParams,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Search the best continuations of one sentence with a beam, until as many have ended as the beam keeps, in at
        most `steps`, the last of which is the one that the program was made for. Return the 2 * beam continuations of
        every step, best first, (steps taken, 2 * beam) each: the sums of their log-probabilities, the hypotheses that
        they continue, and their tokens.

        held: (2 * beam, slots) whose first half is the `row_owner` of all layers. first: the last token of the prefix.
        Vectors of tokens are table (vocab, width) times `scale`, plus the row of `added` (steps, width) for the
        position. output: gives the logits.
        """
        (size, slots), wide, last = held.shape, table.shape[1], self.end
        size //= 2
        tokens, parents, totals = (t.new_empty(steps, 2 * size) for t in (held, held, table))
        x, logits = table.new_empty(size, wide), table.new_empty(size, output.out)
        room = self._workspace(kernels, size, wide, table.element_size())
        pointers = (t.data_ptr() for t in (x, logits, held, tokens, parents, totals))
        sizes = (size, wide, slots, steps, first, end)
        made = SearchArgs(table.data_ptr(), added.data_ptr(), addressof(output), *pointers, *sizes, scale)
        taken = kernels.named["search", table.dtype](
            self.every, len(self.branches), last and addressof(last), made, room,
            threads_for(self.work + output.wide * output.out),
        )  # fmt: skip
        return totals[:taken], parents[:taken], tokens[:taken]

    def _workspace(self, kernels: Kernels, rows: int, wide: int, size: int) -> Workspace:
        """Return scratch memory for rows of `wide` elements of `size` bytes."""
        most = list(map(max, zip(*[one.wants for one in self.branches], strict=True)))
        parts = (rows * wide, rows * wide, *most[:3], (rows + kernels.rows) * (most[3] + 1))
        begins = list(accumulate([-(-part * size // 64) * 64 for part in parts], initial=0))
        memory = torch.empty(begins[-1] + 64, dtype=torch.uint8)
        origin = -(-memory.data_ptr() // 64) * 64
        made = Workspace(*[origin + begin for begin in begins[:-1]])
        made.held = memory
        return made


def norm_params(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centres: bool) -> NormParams | None:
    """Return the struct of a norm of x; None where its weights have another dtype or are not contiguous."""
    if any(t is not None and (t.dtype != x.dtype or not t.is_contiguous()) for t in (weight, bias)):
        return None
    return NormParams(*(None if t is None else t.data_ptr() for t in (weight, bias)), eps, centres)


def top_k(
    kernels: Kernels, x: Tensor, packed: Tensor, bias: Tensor | None, vocab: int, k: int
) -> tuple[Tensor, Tensor]:
    """x (rows, in) -> log-probabilities and ids of the k most probable tokens, best first, (rows, k) each."""
    rows, wide = x.shape
    bias = None if bias is None else bias.contiguous()
    best, mass = x.new_empty(rows, k), x.new_empty(rows)
    at = torch.empty(rows, k, dtype=torch.long)
    turned = x.new_empty(-(-rows // kernels.rows) * kernels.rows, wide)
    state = torch.empty(rows * kernels.state[x.dtype] + 64, dtype=torch.uint8)
    kernels.named["top_k", x.dtype](
        x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), best.data_ptr(), at.data_ptr(),
        mass.data_ptr(), turned.data_ptr(), -(-state.data_ptr() // 64) * 64, rows, wide, vocab, k,
    )  # fmt: skip
    return best - best[:, :1] - mass.log()[:, None], at
