"""A memory that fades: one matrix per head takes up every key and value, and is read by every query. In chunks, so that
time is linear in the length and nothing is as large as its square.

    S_t = diag(exp(decay_t)) S_(t-1) + k_t v_t^T            (key x value)
    o_t = q_t S_t                                       or, with a bonus u,  o_t = q_t (S_(t-1) + diag(u) k_t v_t^T)

    y, state = fade(q, k, v, decay=None, state=None, valid=None, bonus=None)

    q, k    (batch, heads, time, key)
    v       (batch, heads, time, value)
    decay   None, or the logarithm of what is kept, never above 0, as anything that broadcasts to
            (batch, heads, time, key): (heads, 1, 1) fades each head at its own rate, (batch, heads, time, 1) also each
            position, (batch, heads, time, key) also each channel of a key
    state   (batch, heads, key, value) from the step before; None: zeros
    valid   (batch, time): what is not real leaves the state as it is
    bonus   (heads, key), the u above
    y       (batch, heads, time, value) in the dtype of q; the state after it in at least single precision

For a normaliser, o_t = q_t S_t / q_t z_t with z_t the sum of keys, give v one more channel that is 1 everywhere:
`with_ones(v)`. The last channel of y is then q_t z_t, and the last column of the state is z_t. Since y has the dtype of
q, and such sums leave the range of half precision, make q single before: `q.to(exact(q.dtype))`. `flops` is the cost.

Within a chunk the weights q_i k_j exp(decay_(j+1) + ... + decay_i) are made block by block, two neighbours joined into
one of twice the size: q is faded by what lies between the seam and itself, k by what lies between itself and the seam,
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

CHUNK = 64  # positions whose weights are written down together; a power of 2


class Summary(NamedTuple):
    """The state of a mixer that remembers by one matrix per head."""

    matrix: Tensor  # (batch, heads, key, value)


def fade(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    state: Tensor | None = None,
    valid: Tensor | None = None,
    bonus: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    note("fade", NO_KERNEL)
    dtype, time, size = q.dtype, q.shape[2], chunk_size(q.shape[2], chunk)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (t.to(exact(dtype)) for t in (q, k, v))
        state = empty(q, k.shape[-1], v.shape[-1]) if state is None else state.to(q.dtype)
        if valid is not None:
            k = k.masked_fill(~valid[:, None, :, None], 0.0)
        if decay is not None:
            decay = cut(spread(decay.to(q.dtype), time, valid), size)
        if bonus is not None:
            bonus = bonus.to(q.dtype)[:, None, None]  # (heads, 1, 1, key)
        q, k, v = (cut(t, size) for t in (q, k, v))
        weights, read, write, kept = weigh(q, k, decay, bonus)
        begins, state = carry(state, (k * write).mT @ v, kept)
        y = weights @ v + (q * read) @ begins
    return y.flatten(2, 3)[:, :, :time].to(dtype), state


def weigh(q: Tensor, k: Tensor, decay: Tensor | None, bonus: Tensor | None) -> tuple:
    """q, k, decay (batch, heads, chunks, size, key) -> the weights (batch, heads, chunks, size, size); what is left at
    each position of what stood before the chunk, and at the chunk's end of what each position writes, both to multiply
    with; and what is left over the whole chunk, (batch, heads, chunks, key, 1). None: all of it."""
    own = (q * k if bonus is None else q * k * bonus).sum(-1)  # what a position has from itself
    if decay is None:
        return (q @ k.mT).tril(-1) + torch.diag_embed(own), 1.0, 1.0, None
    before = decay if bonus is None else torch.zeros_like(decay)  # with a bonus, memory is read before it fades
    if decay.shape[-1] == 1:
        logs = torch.zeros_like(decay[..., 0])
        logs, since, until, whole = join(logs, before, decay, lambda late, early, *_: late + early.mT, float("-inf"))
        weights = q @ k.mT * logs.exp()
        if bonus is not None:
            weights = weights.tril(-1) + torch.diag_embed(own)
    else:

        def meet(late: Tensor, early: Tensor, at: int) -> Tensor:
            new, old = halves(q.unflatten(-2, (-1, at)))[1], halves(k.unflatten(-2, (-1, at)))[0]
            return (new * late.exp()) @ (old * early.exp()).mT

        weights, since, until, whole = join(own, before, decay, meet, 0.0)
    return weights, since.exp(), until.exp(), whole.exp().mT


def join(
    own: Tensor, before: Tensor, decay: Tensor, meet: Callable[[Tensor, Tensor, int], Tensor], ahead: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks of one position each, joined by twos until one is left. For a block of `at` positions:

    blocks  (..., at, at)    the matrix that is made; own (..., size) is its diagonal, and `ahead` fills what is above
    since   (..., at, key)   decays from the block's beginning to where a position reads; before (..., size, key) of one
    until   (..., at, key)   decays from after a position to the block's end
    whole   (..., 1, key)    decays of the whole block
    """
    blocks, since, whole = own[..., None, None], before[..., None, :], decay[..., None, :]
    until, at = torch.zeros_like(whole), 1
    while blocks.shape[-3] > 1:
        (early, late), (early_since, late_since) = halves(blocks), halves(since)
        (early_until, late_until), (early_whole, late_whole) = halves(until), halves(whole)
        cross = meet(late_since, early_until, at).expand_as(late)
        top = F.pad(early, (0, at), value=ahead)
        blocks = torch.cat((top, torch.cat((cross, late), -1)), -2)
        since = torch.cat((early_since, late_since + early_whole), -2)
        until = torch.cat((early_until + late_whole, late_until), -2)
        whole, at = early_whole + late_whole, 2 * at
    return blocks[..., 0, :, :], since[..., 0, :, :], until[..., 0, :, :], whole[..., 0, :, :]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., blocks, at, channels) -> the first and the second of every two blocks."""
    early, late = x.unflatten(-3, (-1, 2)).unbind(-3)
    return early, late


def carry(state: Tensor, gained: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """gained (batch, heads, chunks, key, value) and kept (batch, heads, chunks, key, 1) in each chunk -> the memory at
    the beginning of each, and after the last."""
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


def exact(dtype: torch.dtype) -> torch.dtype:
    """What sums over many positions are kept in."""
    return torch.promote_types(dtype, torch.float32)


def empty(like: Tensor, key: int, value: int) -> Tensor:
    """The memory (batch, heads, key, value) before the first position, for queries (batch, heads, ...)."""
    return like.new_zeros(*like.shape[:2], key, value, dtype=exact(like.dtype))


def chunk_size(time: int, chunk: int = CHUNK) -> int:
    """The least power of 2 that holds `time` positions, `chunk` at most."""
    return min(chunk, 1 << (time - 1).bit_length())


def cut(x: Tensor, size: int) -> Tensor:
    """(batch, heads, time, channels) -> (batch, heads, chunks, size, channels), zeros at the end."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def spread(decay: Tensor, time: int, valid: Tensor | None) -> Tensor:
    """Decays (batch or 1, heads or 1, time, key or 1); none where a column is not real."""
    decay = decay.view(*[1] * (4 - decay.dim()), *decay.shape).expand(-1, -1, time, -1)
    return decay if valid is None else decay.masked_fill(~valid[:, None, :, None], 0.0)


def flops(length: int, heads: int, key: int, value: int, channels: bool = False, chunk: int = CHUNK) -> int:
    """Of the matrix products of `fade` for one sequence; channels: those of a key fade each at its own rate."""
    size = chunk_size(length, chunk)
    chunks = -(-length // size)
    weights = size * (size - 1) * key if channels and key > 1 else 2 * size * size * key
    return heads * chunks * (weights + 2 * size * size * value + 4 * size * key * value)
