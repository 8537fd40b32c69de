"""Paths through a directed acyclic graph whose vertices say tokens.

    p(y) = sum over paths 0 = a_1 < a_2 < ... < a_m = last of
           prod over i of p(y_i | vertex a_i)  prod over i of link(a_i -> a_(i+1))

The sum is a dynamic program over the target. It is computed in float64 as a product of probabilities that are scaled by
the largest of each row, so that a step is a matrix product.

Huang et al. 2022, "Directed Acyclic Transformer for Non-Autoregressive Machine Translation", arXiv:2205.07459. Joint
Viterbi decoding: Shao et al. 2022, arXiv:2210.05193.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_likelihood(match: Tensor, links: Tensor, targets: Tensor, vertices: Tensor) -> Tensor:
    """Return log p(y) (batch,); minus infinity where there is no path of that length.

    match:    (batch, m, n) the log-probability of each target token at each vertex.
    links:    (batch, n, n) log-probabilities from row to column, -inf for what does not lead forward.
    targets, vertices: (batch,) how many of the m tokens and the n vertices are real.
    """
    match, ways = match.double(), links.double().exp()
    floor = torch.finfo(torch.float64).tiny
    total = match.new_full(match[:, 0].shape, -torch.inf)
    total = torch.cat((match[:, 0, :1], total[:, 1:]), 1)
    every = [total]
    for i in range(1, match.shape[1]):
        most = total.amax(1, keepdim=True).detach()
        most = torch.where(most.isfinite(), most, 0.0)
        reached = ((total - most).exp()[:, None] @ ways)[:, 0]
        total = torch.where(reached > 0, reached.clamp(min=floor).log() + most, -torch.inf) + match[:, i]
        every.append(total)
    ends = torch.stack(every, 1)[torch.arange(len(match), device=match.device), targets - 1]
    return ends.gather(1, (vertices - 1)[:, None])[:, 0].to(links.dtype)


def best_alignment(match: Tensor, links: Tensor, targets: Tensor, vertices: Tensor) -> Tensor:
    """Return the vertex (batch, m) that says each target token on the most probable path; -1 behind the target."""
    total = match.new_full(match[:, 0].shape, -torch.inf)
    total[:, 0] = match[:, 0, 0]
    back = []
    for i in range(1, match.shape[1]):
        best, before = (total[:, :, None] + links).max(1)
        going = (i < targets)[:, None]
        total = torch.where(going, best + match[:, i], total)
        back.append(before)
    at = vertices - 1
    path = [torch.where(targets == match.shape[1], at, -1)]
    for i in range(match.shape[1] - 2, -1, -1):
        inside = i + 1 < targets  # the token after this one is on the path
        at = torch.where(inside, back[i].gather(1, at[:, None])[:, 0], at)
        path.append(torch.where(i < targets, at, -1))
    return torch.stack(path[::-1], 1)


def greedy(log_probs: Tensor, links: Tensor, vertices: Tensor, lookahead: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Follow from vertex 0 the best link at each step to the last vertex, and say the best token there. With lookahead,
    the best link is the one with the best product of its own probability and that of the token behind it.

    Return tokens (batch, n), the vertices that said them (batch, n), -1 behind the end, and log-probabilities (batch,)
    of the path and its tokens. log_probs: (batch, n, vocab), links: (batch, n, n), vertices: (batch,).
    """
    said, tokens = log_probs.max(-1)
    ways = links + said[:, None] if lookahead else links
    real = torch.arange(links.shape[1], device=links.device) < vertices[:, None]
    following = ways.masked_fill(~real[:, None], -torch.inf).argmax(-1)  # (batch, n)
    at, last = torch.zeros_like(vertices), vertices - 1
    path, score = [at], said[:, 0].clone()
    done = at == last
    while not bool(done.all()):
        after = following.gather(1, at[:, None])[:, 0]
        after = torch.minimum(torch.maximum(after, at + 1), last)  # forward, so that it ends, whatever the links are
        step = links[torch.arange(len(at), device=at.device), at, after] + said.gather(1, after[:, None])[:, 0]
        score = torch.where(done, score, score + step)
        at = torch.where(done, at, after)
        path.append(torch.where(done, -1, at))
        done = at == last
    route = torch.stack(path, 1)
    return tokens.gather(1, route.clamp(min=0)), route, score


def viterbi(
    log_probs: Tensor, links: Tensor, vertices: Tensor, length_penalty: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """As `greedy`, but the best path of all: of every length the most probable, and of these the one with the best
    log-probability / length^length_penalty."""
    said, tokens = log_probs.max(-1)
    n = links.shape[1]
    total = torch.full_like(said, -torch.inf)
    total[:, 0] = said[:, 0]
    last = (vertices - 1)[:, None]
    ends, back = [total.gather(1, last)[:, 0]], []
    for _ in range(1, n):
        best, before = (total[:, :, None] + links).max(1)
        total = best + said
        back.append(before)
        ends.append(total.gather(1, last)[:, 0])
    sums = torch.stack(ends, 1)  # (batch, n) by the number of vertices on the path
    sizes = torch.arange(1, n + 1, device=links.device, dtype=sums.dtype)
    count = (sums / sizes**length_penalty).argmax(1) + 1
    at = last[:, 0]
    route = torch.full_like(tokens, -1)
    for i in range(n - 1, -1, -1):
        route[:, i] = torch.where(i < count, at, -1)
        if i:
            at = torch.where(i < count, back[i - 1].gather(1, at[:, None])[:, 0], at)
    route = route[:, : int(count.max())]
    return tokens.gather(1, route.clamp(min=0)), route, sums.gather(1, (count - 1)[:, None])[:, 0]
