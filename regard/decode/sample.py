"""One token after the other: the likeliest, or drawn at random from the likely ones.

    p = softmax(scores / temperature), then in this order, each on what the one before it left:
    top-k: the k likeliest    top-p: the fewest that have p together    min-p: those at least min_p times the likeliest

top-p: Holtzman et al. 2020, arXiv:1904.09751. min-p: Nguyen et al. 2024, arXiv:2407.01082. Repetition penalty: Keskar
et al. 2019, arXiv:1909.05858.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.core import UserError, select
from regard.ops.dispatch import NO_KERNEL, note

from .result import Hypothesis, Request, Stepper, must_be_numbers
from .session import session

FEW = 0.75  # when no more than this share of a batch goes on, the others leave it: each time costs a copy of the state

Listen = Callable[[int, int], None]
Seeds = Sequence[int | Sequence[int]]


class SamplingParams(NamedTuple):
    """How a token is chosen: see `stream`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Said(NamedTuple):
    """What one step adds: only the rows that were still going are named."""

    rows: Tensor  # (going,) which of the request's rows
    tokens: Tensor  # (going,) the end mark among them
    logprobs: Tensor  # (going,) by the model itself


def greedy(model: Stepper, request: Request, listen: Listen | None = None) -> list[Hypothesis]:
    """The likeliest token at every step."""
    return sample(model, request, temperature=0.0, listen=listen)


def sample(
    model: Stepper,
    request: Request,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seeds: Seeds | None = None,
    listen: Listen | None = None,
) -> list[Hypothesis]:
    """As `stream`, to the end. `listen(row, token)` hears every token but the end mark as it comes."""
    batch, device = request.prefix.shape[0], request.prefix.device
    said = torch.full((batch, int(request.most.max())), request.end, device=device)
    logprobs = torch.zeros(said.shape, device=device)
    for at, new in enumerate(stream(model, request, temperature, top_k, top_p, min_p, repetition_penalty, seeds)):
        said[new.rows, at] = new.tokens
        logprobs[new.rows, at] = new.logprobs.float()
        if listen:
            for row, token in zip(new.rows.tolist(), new.tokens.tolist(), strict=True):
                if token != request.end:
                    listen(row, token)
    lengths = (said != request.end).sum(1)  # nothing is said after the end
    told = (said, lengths, logprobs.sum(1), lengths < request.most)
    return [
        Hypothesis(tokens[:length], logprob, logprob, ended)
        for tokens, length, logprob, ended in zip(*(t.tolist() for t in told), strict=True)
    ]


@torch.no_grad()
def stream(
    model: Stepper,
    request: Request,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seeds: Seeds | None = None,
) -> Iterator[Said]:
    """Step by step, all rows at once.

    temperature: 0 is greedy.
    top_k, top_p, min_p: leave out the unlikely; 0, 1 and 0 leave out nothing.
    repetition_penalty: above 1 discourages tokens that a row had before, its prefix included.
    seeds: one for each row, a number or several; a row's answer depends on its own alone. None: new ones.
    """
    sampling = _checked(SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty))
    model = session(model)
    coming, state = request.begin(model)
    most, longest, room, batch = request.most, int(request.lengths.max()), request.room, len(request.prefix)
    noise = noise_of(seeds, batch, int(most.max()), coming.x.device) if temperature else None
    rows = torch.arange(batch, device=coming.x.device)  # which of the request's rows each one is
    going = torch.ones_like(rows, dtype=torch.bool)
    before = _real(request) if repetition_penalty != 1 else None  # (rows, time) all that each row holds
    said = request.prefix[:, :0]  # (rows, time) since the prefix

    def choose(scores: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        chance = None if noise is None else noise[rows[some], at]
        return chosen(scores, None if before is None else before[some], chance, sampling)

    for at in count():
        tokens, logprobs = coming.each(choose)
        if not at:
            must_be_numbers(logprobs)
        yield Said(rows[going], tokens[going], logprobs[going])
        going &= (tokens != request.end) & (at + 1 < most[rows])
        left = going.nonzero()[:, 0]
        if not len(left):
            return
        if len(left) <= FEW * len(rows) or (len(left) < len(rows) and longest + at >= room):
            rows, tokens, going, state = rows[left], tokens[left], going[left], select(state, left)
            before, said = None if before is None else before[left], said[left]
        if before is not None:
            before = torch.cat((before, tokens[:, None]), 1)
        if request.rule is not None:
            said = torch.cat((said, tokens[:, None]), 1)
        coming, state = request.follow(model, tokens[:, None], state, said)


def chosen(
    scores: Tensor, before: Tensor | None, chance: Tensor | None, sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    """scores (rows, vocab) -> a token for each row, and its log p by the model itself. before (rows, time): what a row
    holds, where repeats are discouraged; chance (rows,): above 0, up to 1, where tokens are drawn."""
    note("choice of tokens", NO_KERNEL)
    penalized = (
        scores
        if sampling.repetition_penalty == 1 or before is None
        else discourage(scores, before, sampling.repetition_penalty)
    )
    tokens = penalized.argmax(-1) if chance is None else draw(*likely(penalized, *sampling[:4]), chance)
    return tokens, scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(-1)


def discourage(scores: Tensor, before: Tensor, repetition_penalty: float) -> Tensor:
    """scores (rows, vocab) with those of the tokens `before` (rows, time) made smaller."""
    old = scores.gather(1, before)
    return scores.scatter(1, before, torch.where(old > 0, old / repetition_penalty, old * repetition_penalty))


def likely(
    scores: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """scores (rows, vocab) -> weights (rows, n) of the tokens (rows, n) that may be drawn; None: of all in their order.
    The weights need not sum to 1."""
    weights = ((scores - scores.amax(-1, keepdim=True)) / temperature).softmax(-1)
    tokens = None
    vocab = weights.shape[-1]
    if 0 < top_k < vocab or top_p < 1:
        weights, tokens = weights.topk(min(top_k or vocab, vocab), -1)
    if top_p < 1:
        share = weights / weights.sum(-1, keepdim=True)
        weights = weights.masked_fill(share.cumsum(-1) - share >= top_p, 0.0)  # the first to pass the mark stays
    if min_p:
        weights = weights.masked_fill(weights < min_p * weights.amax(-1, keepdim=True), 0.0)
    return weights, tokens


def draw(weights: Tensor, tokens: Tensor | None, noise: Tensor) -> Tensor:
    """The token at which the running sum of the weights reaches the share `noise` (rows,) of it, above 0, up to 1."""
    sums = weights.cumsum(-1)
    chosen = torch.searchsorted(sums, noise[:, None].to(sums.dtype) * sums[:, -1:])
    chosen = chosen.clamp(max=sums.shape[-1] - 1)  # what is not a number is found out later
    return (chosen if tokens is None else tokens.gather(1, chosen))[:, 0]


def noise_of(seeds: Seeds | None, rows: int, most: int, device: torch.device) -> Tensor:
    """(rows, most), above 0, up to 1: what a row needs does not depend on who else is in the batch."""
    if seeds is not None and len(seeds) != rows:
        raise UserError(f"sampling needs one seed for each row: {rows}, not {len(seeds)}")
    sources = [np.random.default_rng(seed) for seed in (seeds if seeds is not None else [None] * rows)]
    noise = torch.from_numpy(1 - np.stack([source.random(most) for source in sources]))
    return noise.float().to(device) if device.type == "mps" else noise.to(device)


def _real(request: Request) -> Tensor:
    """The prefix, with its first token where it is padded."""
    return request.prefix if request.valid is None else request.prefix.where(request.valid, request.prefix[:, :1])


def _checked(sampling: SamplingParams) -> SamplingParams:
    temperature, top_k, top_p, min_p, repetition_penalty = sampling
    if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1 and repetition_penalty > 0):
        raise UserError(
            "sampling needs temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1 and repetition_penalty > 0, "
            f"not {temperature:g}, {top_k}, {top_p:g}, {min_p:g} and {repetition_penalty:g}"
        )
    return sampling
