"""Attention by torch's flex_attention, which compiles a fused kernel: for CUDA, and for CPU without gradients.

A pattern becomes a table of blocks (skipped, full, or with a mask of their own), a bias becomes a table of distances:
so whatever a pattern or a position is made of, the kernel to be compiled only looks things up.

Dong et al. 2024, "Flex Attention", arXiv:2412.05496.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from regard.core import Pattern, Position, UserError
from regard.errors import in_one_line
from regard.native import private
from regard.schema import name_of

from .attention_mask import AttentionMask

BLOCK = 128
INSTEAD = "use kernel 'blocks' or 'sdpa'"


def supports(mask: AttentionMask) -> bool:
    """Queries and keys must be the same positions from 0 on, and not few: torch's kernel for CPU errs at 24 of them."""
    return mask.from_start and mask.key_at.shape[1] >= BLOCK


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, position: Position, plain: Tensor, drop: float
) -> Tensor:
    if drop:
        raise UserError(f"kernel 'flex' cannot drop attention weights: {INSTEAD}, or no weight_dropout")
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise UserError(f"kernel 'flex' has no gradients on CPU: {INSTEAD} for training")
    if q.dtype == torch.float64:
        raise UserError(f"kernel 'flex' does not compute in float64: {INSTEAD}")
    fixed = mask.pattern.fixed and not mask.holes
    block_mask = _mask(mask.pattern, q.shape[2], q.shape[1], q.device) if fixed else block_mask_of(mask, q.shape[1])
    bias = bias_of(position, q)
    last = q.shape[2] - 1

    def score(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias[head, query - key + last]

    try:
        return compiled(q.device.type)(
            q,
            k,
            v,
            score_mod=None if bias is None else score,
            block_mask=block_mask,
            scale=1.0,
            enable_gqa=k.shape[1] != q.shape[1],
        )
    except RuntimeError as error:
        if not private.is_compiler_error(error):
            raise
        raise UserError(f"kernel 'flex' cannot be compiled here: {INSTEAD} ({in_one_line(error)[:120]})") from None


@lru_cache
def compiled(device: str) -> Any:
    """When first wanted. On CPU for every shape anew: what torch writes for all of them at once does not compile."""
    return torch.compile(flex_attention, dynamic=False if device == "cpu" else None)


def bias_of(position: Position, q: Tensor) -> Tensor | None:
    """(heads, 2n - 1): what a position adds to the score of a key at each distance, the furthest ahead first."""
    if not position.acts("bias"):
        return None
    if position.needs_query or not position.relative:
        why = "asks the query" if position.needs_query else "does not go by distance alone"
        raise UserError(f"kernel 'flex' cannot do position '{name_of(position)}', which {why}: {INSTEAD}")
    last = q.shape[2] - 1
    at = torch.arange(2 * last + 1, device=q.device)
    bias = position.bias(at[None, None, :, None], at[None, None, None, last : last + 1], q)
    return None if bias is None else bias.expand(1, q.shape[1], -1, 1)[0, :, :, 0]


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # it will be met again in training
def _mask(pattern: Pattern, length: int, heads: int, device: torch.device) -> BlockMask:
    at = torch.arange(length, device=device)[None]
    return block_mask_of(AttentionMask(pattern, at, at, from_start=True), heads)


def block_mask_of(mask: AttentionMask, heads: int) -> BlockMask:
    """The table of blocks, made one row of blocks at a time."""
    length = mask.key_at.shape[1]
    wide = -(-length // BLOCK) * BLOCK
    masks, kinds = [mask.key_at.new_zeros(2, BLOCK, BLOCK, dtype=torch.bool)], []
    masks[0][1] = True
    count = 2  # masks so far: nothing, everything, and those of the blocks between
    for begin in range(0, length, BLOCK):
        allowed = mask.at(mask.query_at[:, None, begin : begin + BLOCK, None], mask.key_at[:, None, None, :], heads)
        queries = min(BLOCK, length - begin)
        allowed = F.pad(allowed.expand(-1, -1, queries, length), (0, wide - length, 0, BLOCK - queries))
        allowed = allowed.unflatten(-1, (-1, BLOCK)).movedim(-2, 2)  # (rows, heads, blocks, queries, keys)
        kind = allowed.all((-1, -2)).long()
        between = allowed.any((-1, -2)) & (kind == 0)
        masks.append(allowed[between])
        kind[between] = torch.arange(count, count + len(masks[-1]), device=kind.device)
        count += len(masks[-1])
        kinds.append(kind)
    table, kind = torch.cat(masks), torch.stack(kinds, 2)  # (masks, queries, keys), (rows, heads, blocks, blocks)
    rows, own = kind.shape[:2]

    def mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        which = kind[row if rows > 1 else 0, head if own > 1 else 0, query // BLOCK, key // BLOCK]
        return table[which, query % BLOCK, key % BLOCK]

    return BlockMask.from_kv_blocks(
        *_block_indices(kind > 1),
        *_block_indices(kind == 1),
        BLOCK_SIZE=BLOCK,
        mask_mod=mod,
        seq_lengths=(length, length),
    )


def _block_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, heads, blocks, blocks) -> how many are chosen in each line, and their numbers, those chosen first."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1).int(), order.int()
