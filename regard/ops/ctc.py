"""Latent alignments: a canvas longer than the target, which becomes the target when repeats are joined and blanks go.

    p(y) = sum over all canvases a with collapse(a) = y of prod over i of p_i(a_i)        collapse(_aab_b_) = abb

The loss is torch's. Graves et al. 2006, "Connectionist Temporal Classification". In machine translation: Libovicky and
Helcl 2018, arXiv:1811.04719. Prefix beam search: Graves and Jaitly 2014; Hannun et al. 2014, arXiv:1408.2873.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def ctc_loss(blank: Tensor, match: Tensor, targets: Tensor, canvas: Tensor, lengths: Tensor) -> Tensor:
    """Return -log p(targets) (batch,): infinite where a canvas is too short for its target.

    blank:   (batch, n) the log-probability of the blank at each position.
    match:   (batch, n, m) the log-probability of each target token at each position.
    targets: (batch, m); canvas, lengths: (batch,) how many of n and of m are real.
    """
    first = (targets[:, :, None] == targets[:, None]).long().argmax(-1)  # equal tokens are one class
    logs = torch.cat((blank[..., None], match), -1)
    loss = F.ctc_loss(logs.transpose(0, 1), first + 1, canvas, lengths, blank=0, reduction="none")
    # torch adds exp(logs) to the gradient, which the backward pass of a log-softmax over all tokens would cancel.
    real = torch.arange(logs.shape[1], device=logs.device) < canvas[:, None]
    mass = (logs.exp() * real[..., None]).sum((1, 2))
    return loss - (mass - mass.detach())


def needed(targets: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the length (batch,) that a canvas must have for targets (batch, m): a blank between equal neighbors."""
    equal = targets[:, 1:] == targets[:, :-1]
    if valid is None:
        return targets.shape[1] + equal.sum(1)
    return valid.sum(1) + (equal & valid[:, 1:]).sum(1)


def collapse(tokens: Tensor, blank: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Join repeats and drop blanks. Return the tokens (batch, n), moved to the front, and how many are left (batch,);
    behind them stands the blank."""
    keep = tokens != blank
    keep[:, 1:] &= tokens[:, 1:] != tokens[:, :-1]
    if valid is not None:
        keep &= valid
    order = torch.argsort(~keep, dim=1, stable=True)
    return tokens.masked_fill(~keep, blank).gather(1, order), keep.sum(1)


def beam_search(
    log_probs: Tensor, blank: int, size: int, score: Callable[[tuple[int, ...]], float] | None = None
) -> list[tuple[tuple[int, ...], float]]:
    """Return the `size` most probable targets of one canvas (n, vocab) with their log-probabilities, best first. The
    alignments of a target are added up. score: a number that is added for each token, such as a language model's."""
    none = (-math.inf, -math.inf)
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}  # ends in a blank; in its last token
    kept = min(size + 1, log_probs.shape[1])
    for column in log_probs:
        logs, ids = column.topk(kept)
        likely = dict(zip(ids.tolist(), logs.tolist(), strict=True))
        gap = float(column[blank])
        grown: dict[tuple[int, ...], tuple[float, float]] = defaultdict(lambda: none)
        for prefix, (blank_end, token_end) in beams.items():
            total = _add(blank_end, token_end)
            grown[prefix] = _add(grown[prefix][0], total + gap), grown[prefix][1]
            if prefix:
                repeat = token_end + float(column[prefix[-1]])
                grown[prefix] = grown[prefix][0], _add(grown[prefix][1], repeat)
            for token, log in likely.items():
                if token == blank:
                    continue
                before = blank_end if prefix and prefix[-1] == token else total
                longer = (*prefix, token)
                more = 0.0 if score is None else score(longer)
                grown[longer] = grown[longer][0], _add(grown[longer][1], before + log + more)
        possible = [one for one in grown.items() if _add(*one[1]) > -math.inf]
        beams = dict(sorted(possible, key=lambda one: -_add(*one[1]))[:size])
    return [(prefix, _add(*ends)) for prefix, ends in beams.items()]


def _add(one: float, two: float) -> float:
    """Return log(exp(one) + exp(two))."""
    most = max(one, two)
    return most if most == -math.inf else most + math.log1p(math.exp(min(one, two) - most))
