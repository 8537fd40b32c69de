"""Linear attention with decay (gated linear attention): one matrix per head stores all keys and values and is read by
every query. Computed in chunks, so that time and memory are linear in the length.

    S_t = diag(exp(decay_t)) S_(t-1) + k_t v_t^T            (key x value)
    o_t = q_t S_t                                       or, with a bonus u,  o_t = q_t (S_(t-1) + diag(u) k_t v_t^T)

    y, state = gated_linear_attention(q, k, v, decay=None, state=None, valid=None, bonus=None)

    q, k    (batch, heads, time, key)
    v       (batch, heads, time, value)
    decay   None, or the log of the factor that is kept, never above 0, broadcastable to (batch, heads, time, key):
            (heads, 1, 1) is one rate per head, (batch, heads, time, 1) also per position, (batch, heads, time, key)
            also per key channel
    state   (batch, heads, key, value) from the previous step; None: zeros
    valid   (batch, time): positions that are not real leave the state unchanged
    bonus   (heads, key), the u above
    y       (batch, heads, time, value) in the dtype of q; the state after it in at least single precision

For a normalizer, o_t = q_t S_t / q_t z_t with z_t the sum of keys, give v one more channel that is 1 everywhere:
`with_ones(v)`. The last channel of y is then q_t z_t, and the last column of the state is z_t. Since y has the dtype of
q, and such sums leave the range of half precision, convert q first: `q.to(accumulation_dtype(q.dtype))`. `flops`
returns the cost.

Within a chunk the weights q_i k_j exp(decay_(j+1) + ... + decay_i) are computed block by block, two neighbors merged
into one of twice the size: q is decayed from the boundary to itself, k from itself to the boundary,
so that no exponent is above 0, nothing is divided and no sum cancels. These are the secondary chunks of Yang et al.
2023, "Gated Linear Attention", arXiv:2312.06635, all the way down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UserError

from .dispatch import NO_KERNEL, note

CHUNK = 64  # positions of a chunk; a power of 2


class Summary(NamedTuple):
    """The state of a mixer with one memory matrix per head."""

    matrix: Tensor  # (batch, heads, key, value)


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    state: Tensor | None = None,
    valid: Tensor | None = None,
    bonus: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    note("gated linear attention", NO_KERNEL)
    dtype, time, size = q.dtype, q.shape[2], chunk_size(q.shape[2], chunk)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (t.to(accumulation_dtype(dtype)) for t in (q, k, v))
        state = empty_memory(q, k.shape[-1], v.shape[-1]) if state is None else state.to(q.dtype)
        if valid is not None:
            k = k.masked_fill(~valid[:, None, :, None], 0.0)
        if decay is not None:
            decay = split_chunks(expand_decay(decay.to(q.dtype), time, valid), size)
        if bonus is not None:
            bonus = bonus.to(q.dtype)[:, None, None]  # (heads, 1, 1, key)
        q, k, v = (split_chunks(t, size) for t in (q, k, v))
        weights, read, write, kept = chunk_weights(q, k, decay, bonus)
        begins, state = scan_chunks(state, (k * write).mT @ v, kept)
        y = weights @ v + (q * read) @ begins
    return y.flatten(2, 3)[:, :, :time].to(dtype), state


def chunk_weights(q: Tensor, k: Tensor, decay: Tensor | None, bonus: Tensor | None) -> tuple:
    """q, k, decay (batch, heads, chunks, size, key) -> the weights (batch, heads, chunks, size, size); the decay
    factors from the chunk's beginning to each position, and from each position to the chunk's end; and over the whole
    chunk, (batch, heads, chunks, key, 1), None without decay."""
    own = (q * k if bonus is None else q * k * bonus).sum(-1)  # the diagonal of the weights
    if decay is None:
        return (q @ k.mT).tril(-1) + torch.diag_embed(own), 1.0, 1.0, None
    before = decay if bonus is None else torch.zeros_like(decay)  # with a bonus, memory is read before it decays
    if decay.shape[-1] == 1:
        logs = torch.zeros_like(decay[..., 0])
        logs, since, until, total = merge_blocks(
            logs, before, decay, lambda late, early, *_: late + early.mT, float("-inf")
        )
        weights = q @ k.mT * logs.exp()
        if bonus is not None:
            weights = weights.tril(-1) + torch.diag_embed(own)
    else:

        def meet(late: Tensor, early: Tensor, at: int) -> Tensor:
            new, old = halves(q.unflatten(-2, (-1, at)))[1], halves(k.unflatten(-2, (-1, at)))[0]
            return (new * late.exp()) @ (old * early.exp()).mT

        weights, since, until, total = merge_blocks(own, before, decay, meet, 0.0)
    return weights, since.exp(), until.exp(), total.exp().mT


def merge_blocks(
    own: Tensor, before: Tensor, decay: Tensor, meet: Callable[[Tensor, Tensor, int], Tensor], above: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge blocks of one position each, two at a time, until one is left. For a block of `size` positions:

    blocks  (..., size, size)  the resulting matrix; `own` is its diagonal, and `above` fills its upper triangle
    since   (..., size, key)   log decay from the block's beginning to where a position reads; `before` for one position
    until   (..., size, key)   log decay from after a position to the block's end
    total   (..., 1, key)      log decay over the block
    """
    blocks, since, total = own[..., None, None], before[..., None, :], decay[..., None, :]
    until, size = torch.zeros_like(total), 1
    while blocks.shape[-3] > 1:
        (early, late), (early_since, late_since) = halves(blocks), halves(since)
        (early_until, late_until), (early_whole, late_whole) = halves(until), halves(total)
        cross = meet(late_since, early_until, size).expand_as(late)
        top = F.pad(early, (0, size), value=above)
        blocks = torch.cat((top, torch.cat((cross, late), -1)), -2)
        since = torch.cat((early_since, late_since + early_whole), -2)
        until = torch.cat((early_until + late_whole, late_until), -2)
        total, size = early_whole + late_whole, 2 * size
    return blocks[..., 0, :, :], since[..., 0, :, :], until[..., 0, :, :], total[..., 0, :, :]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., blocks, size, channels) -> the first and the second of every two blocks."""
    early, late = x.unflatten(-3, (-1, 2)).unbind(-3)
    return early, late


def scan_chunks(state: Tensor, gained: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """gained (batch, heads, chunks, key, value) and kept (batch, heads, chunks, key, 1) of each chunk -> the memory at
    the beginning of each chunk, and after the last."""
    if kept is None:
        sums = torch.cat((state[:, :, None], gained), 2).cumsum(2)
        return sums[:, :, :-1], sums[:, :, -1]
    begins = []
    for more, left in zip(gained.unbind(2), kept.unbind(2), strict=True):
        begins.append(state)
        state = state * left + more
    return torch.stack(begins, 2), state


def with_ones(v: Tensor) -> Tensor:
    """(..., value) -> (..., value + 1), the last channel 1."""
    return F.pad(v, (0, 1), value=1.0)


def head_dim(width: int, heads: int) -> int:
    if width % heads:
        raise UserError(f"width {width} is not divisible by {heads} heads: change one, or give dim")
    return width // heads


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, time, heads * dim) -> (batch, heads, time, dim)"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums over many positions: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def empty_memory(like: Tensor, key: int, value: int) -> Tensor:
    """Return a zero memory (batch, heads, key, value) for queries (batch, heads, ...)."""
    return like.new_zeros(*like.shape[:2], key, value, dtype=accumulation_dtype(like.dtype))


def chunk_size(time: int, chunk: int = CHUNK) -> int:
    """Return the smallest power of 2 that is at least `time`, `chunk` at most."""
    return min(chunk, 1 << (time - 1).bit_length())


def split_chunks(x: Tensor, size: int) -> Tensor:
    """(batch, heads, time, channels) -> (batch, heads, chunks, size, channels), padded with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def expand_decay(decay: Tensor, time: int, valid: Tensor | None) -> Tensor:
    """Return the decay as (batch or 1, heads or 1, time, key or 1), with 0 for columns that are not real."""
    decay = decay.view(*[1] * (4 - decay.dim()), *decay.shape).expand(-1, -1, time, -1)
    return decay if valid is None else decay.masked_fill(~valid[:, None, :, None], 0.0)


def flops(length: int, heads: int, key: int, value: int, channels: bool = False, chunk: int = CHUNK) -> int:
    """Return the flops of matrix products for one sequence. channels: each key channel has its own decay."""
    size = chunk_size(length, chunk)
    chunks = -(-length // size)
    weights = size * (size - 1) * key if channels and key > 1 else 2 * size * size * key
    return heads * chunks * (weights + 2 * size * size * value + 4 * size * key * value)
