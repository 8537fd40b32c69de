"""A linear-chain conditional random field over the positions of a canvas.

    score(y) = sum over i of emission_i(y_i) + sum over i > 0 of transition_i(y_(i-1), y_i)
    log p(y) = score(y) - log Z             log Z = log of the sum of exp(score) over all sequences

A vocabulary of V tokens has V^2 transitions, so they are of low rank, and all sums are over the k candidates of each
position: the tokens with the largest emissions, in training with the target among them. With k = V nothing is left out.

    transition_i(a, b) = left[a] (I + M_i) right[b]        M_i (rank, rank) depends on the position; None: I alone

Sun et al. 2019, "Fast Structured Decoding for Sequence Models", arXiv:1910.11555. Lafferty et al. 2001.
"""

from __future__ import annotations

import torch
from torch import Tensor


def candidates(emissions: Tensor, count: int, targets: Tensor | None = None) -> Tensor:
    """Return the ids (batch, n, count) of the tokens with the largest emissions (batch, n, vocab) at each position;
    where targets (batch, n) are given, these are among them."""
    if targets is not None:
        emissions = emissions.detach().scatter(2, targets[..., None], torch.inf)
    return emissions.topk(min(count, emissions.shape[2]), -1).indices


def transitions(left: Tensor, right: Tensor, tokens: Tensor, dynamic: Tensor | None = None) -> Tensor:
    """Return the scores (batch, n - 1, k, k) of going from each candidate of a position to each of the next one.

    left, right: (vocab, rank); tokens: (batch, n, k); dynamic: (batch, n - 1, rank, rank), the M above.
    """
    before, after = left[tokens[:, :-1]], right[tokens[:, 1:]]
    if dynamic is not None:
        before = before + before @ dynamic
    return before @ after.mT


def sequence_score(emissions: Tensor, left: Tensor, right: Tensor, targets: Tensor, valid: Tensor | None = None,
                   dynamic: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return the score (batch,) of the sequences `targets` (batch, n), of which the `valid` columns count."""
    scores = emissions.gather(2, targets[..., None])[..., 0]
    steps = transitions(left, right, targets[..., None], dynamic)[..., 0, 0]
    scores = torch.cat((scores[:, :1], scores[:, 1:] + steps), 1)
    return (scores if valid is None else scores.masked_fill(~valid, 0.0)).sum(1)


def log_partition(emissions: Tensor, transitions: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return log Z (batch,) over the candidates: emissions (batch, n, k), transitions (batch, n - 1, k, k)."""
    total = emissions[:, 0]
    for i in range(1, emissions.shape[1]):
        after = (total[:, :, None] + transitions[:, i - 1]).logsumexp(1) + emissions[:, i]
        total = after if valid is None else torch.where(valid[:, i : i + 1], after, total)
    return total.logsumexp(-1)


def log_likelihood(emissions: Tensor, left: Tensor, right: Tensor, targets: Tensor, count: int,
                   valid: Tensor | None = None, dynamic: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return log p(targets) (batch,), normalized over `count` candidates of each position, the target among them.

    emissions: (batch, n, vocab); targets, valid: (batch, n).
    """
    tokens = candidates(emissions, count, targets)
    among = transitions(left, right, tokens, dynamic)
    total = log_partition(emissions.gather(2, tokens), among, valid)
    return sequence_score(emissions, left, right, targets, valid, dynamic) - total


def viterbi(emissions: Tensor, transitions: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the best candidate of each position (batch, n), as its number among the k, and the score (batch,) of the
    whole sequence. Columns that are not valid repeat the last real one."""
    total, back = emissions[:, 0], []
    stay = torch.arange(emissions.shape[2], device=emissions.device).expand_as(total)
    for i in range(1, emissions.shape[1]):
        best, before = (total[:, :, None] + transitions[:, i - 1]).max(1)
        best = best + emissions[:, i]
        if valid is not None:
            real = valid[:, i : i + 1]
            best, before = torch.where(real, best, total), torch.where(real, before, stay)
        total = best
        back.append(before)
    score, last = total.max(1)
    path = [last]
    for before in reversed(back):
        path.append(before.gather(1, path[-1][:, None])[:, 0])
    return torch.stack(path[::-1], 1), score
