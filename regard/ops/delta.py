"""The delta rule: the value stored for a key is moved towards the new value, instead of being added to. Computed in
chunks, so that time is linear in the length and the loop is over chunks, not positions.

    S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T  =  (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T
    o_t = q_t S_t

What is written in a chunk that begins with S is S_t = S + sum over j <= t of k_j u_j^T, where the u_j solve

    u_t + beta_t sum over j < t of (k_t . k_j) u_j = beta_t (v_t - S^T k_t)

a triangular system, solved at once for the part with S and the part without (the WY or UT transform).
Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024, arXiv:2406.06484.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import NO_KERNEL, note
from .fading import CHUNK, accumulation_dtype, chunk_size, empty_memory, split_chunks


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    valid: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """q, k (batch, heads, time, key), v (batch, heads, time, value), beta (batch, heads, time), state (batch, heads,
    key, value), valid (batch, time) -> (batch, heads, time, value), and the state after it. Stable where
    beta |k|^2 < 2."""
    note("delta", NO_KERNEL)
    dtype, time, size = q.dtype, q.shape[2], chunk_size(q.shape[2], chunk)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, beta = (t.to(accumulation_dtype(dtype)) for t in (q, k, v, beta[..., None]))
        state = empty_memory(q, k.shape[-1], v.shape[-1]) if state is None else state.to(q.dtype)
        if valid is not None:
            beta = beta.masked_fill(~valid[:, None, :, None], 0.0)
        q, k, v, beta = (split_chunks(t, size) for t in (q, k, v, beta))
        both = torch.cat((v, k), -1) * beta  # (batch, heads, chunks, size, value + key)
        if size > 1:  # one position alone has nothing before it to solve for
            lower = (k * beta @ k.mT).tril(-1)
            both = torch.linalg.solve_triangular(lower, both, upper=False, unitriangular=True)
        from_zero_state, recalled = both.split((v.shape[-1], k.shape[-1]), -1)
        begins, written = [], []
        for one, two, keys in zip(from_zero_state.unbind(2), recalled.unbind(2), k.unbind(2), strict=True):
            begins.append(state)
            written.append(one - two @ state)
            state = state + keys.mT @ written[-1]
        y = q @ torch.stack(begins, 2) + (q @ k.mT).tril() @ torch.stack(written, 2)
    return y.flatten(2, 3)[:, :, :time].to(dtype), state


def flops(length: int, heads: int, key: int, value: int, chunk: int = CHUNK) -> int:
    """Return the flops of the matrix products of `delta` for one sequence, without the triangular solve."""
    size = chunk_size(length, chunk)
    chunks = -(-length // size)
    system = key if size > 1 else 0  # one position alone has none
    return heads * chunks * (2 * size * size * (system + key + value) + 6 * size * key * value)
