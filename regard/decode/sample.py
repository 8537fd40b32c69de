"""Greedy search and sampling.

    p = softmax(logits / temperature), then in this order, each on what the one before left:
    top-k: the k most probable    top-p: the fewest with total probability p    min-p: at least min_p times the largest

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

from .fused_search import fused_search
from .result import Hypothesis, Request, Stepper, check_not_nan
from .session import Session, session

SHRINK_BELOW = (
    0.75  # of the rows: when no more are unfinished, the others leave the batch, at the cost of a copied state
)

OnToken = Callable[[int, int], None]
Seeds = Sequence[int | Sequence[int]]


class SamplingParams(NamedTuple):
    """How a token is chosen: see `stream`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class NewTokens(NamedTuple):
    """The tokens of one step, for the rows that were unfinished before it."""

    rows: Tensor  # (unfinished,) row numbers of the request
    tokens: Tensor  # (unfinished,) may be the end token
    logprobs: Tensor  # (unfinished,) by the model, before any penalty


def greedy(model: Stepper, request: Request, on_token: OnToken | None = None) -> list[Hypothesis]:
    """Take the most probable token at every step."""
    return sample(model, request, temperature=0.0, on_token=on_token)


def sample(
    model: Stepper,
    request: Request,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seeds: Seeds | None = None,
    on_token: OnToken | None = None,
) -> list[Hypothesis]:
    """Return the complete answers of `stream`. `on_token(row, token)` is called with every token but the end token."""
    batch, device = request.prefix.shape[0], request.prefix.device
    model = session(model)
    if temperature == 0 and repetition_penalty == 1 and on_token is None and isinstance(model, Session):
        found = fused_search(model, request, 1, length_penalty=0.0, num_return=1)
        if found is not None:
            return found
    generated = torch.full((batch, int(request.max_new_tokens.max())), request.end, device=device)
    logprobs = torch.zeros(generated.shape, device=device)
    for at, new in enumerate(stream(model, request, temperature, top_k, top_p, min_p, repetition_penalty, seeds)):
        generated[new.rows, at] = new.tokens
        logprobs[new.rows, at] = new.logprobs.float()
        if on_token:
            for row, token in zip(new.rows.tolist(), new.tokens.tolist(), strict=True):
                if token != request.end:
                    on_token(row, token)
    lengths = (generated != request.end).sum(1)  # nothing follows the end token
    columns = (generated, lengths, logprobs.sum(1), lengths < request.max_new_tokens)
    return [
        Hypothesis(tokens[:length], logprob, logprob, ended)
        for tokens, length, logprob, ended in zip(*(t.tolist() for t in columns), strict=True)
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
) -> Iterator[NewTokens]:
    """Yield the new tokens of every step, for all rows together.

    temperature: 0 is greedy.
    top_k, top_p, min_p: drop improbable tokens; 0, 1 and 0 drop none.
    repetition_penalty: above 1 discourages tokens that occurred in the row, its prefix included.
    seeds: one for each row, a number or several; a row's answer depends on its own seed alone. None: random seeds.
    """
    sampling = _checked(SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty))
    model = session(model)
    upcoming, state = request.begin(model)
    max_new_tokens, longest, capacity, batch = (
        request.max_new_tokens,
        int(request.lengths.max()),
        request.capacity,
        len(request.prefix),
    )
    noise = uniform_noise(seeds, batch, int(max_new_tokens.max()), upcoming.x.device) if temperature else None
    rows = torch.arange(batch, device=upcoming.x.device)  # the request's row number of each row
    going = torch.ones_like(rows, dtype=torch.bool)
    before = _filled_prefix(request) if repetition_penalty != 1 else None  # (rows, time) all tokens of each row
    generated = request.prefix[:, :0]  # (rows, time) tokens since the prefix

    def choose(scores: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        chance = None if noise is None else noise[rows[some], at]
        return choose_tokens(scores, None if before is None else before[some], chance, sampling)

    for at in count():
        tokens, logprobs = upcoming.map_chunks(choose)
        if not at:
            check_not_nan(logprobs)
        yield NewTokens(rows[going], tokens[going], logprobs[going])
        going &= (tokens != request.end) & (at + 1 < max_new_tokens[rows])
        left = going.nonzero()[:, 0]
        if not len(left):
            return
        if len(left) <= SHRINK_BELOW * len(rows) or (len(left) < len(rows) and longest + at >= capacity):
            rows, tokens, going, state = rows[left], tokens[left], going[left], select(state, left)
            before, generated = None if before is None else before[left], generated[left]
        if before is not None:
            before = torch.cat((before, tokens[:, None]), 1)
        if request.logits_processor is not None:
            generated = torch.cat((generated, tokens[:, None]), 1)
        upcoming, state = request.follow(model, tokens[:, None], state, generated)


def choose_tokens(
    scores: Tensor, before: Tensor | None, chance: Tensor | None, sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    """scores (rows, vocab) -> a token for each row, and its log p before any penalty.

    before: (rows, time) the row's tokens, for the repetition penalty. chance: (rows,) in (0, 1]; None: greedy.
    """
    note("choice of tokens", NO_KERNEL)
    penalized = (
        scores
        if sampling.repetition_penalty == 1 or before is None
        else penalize_repetition(scores, before, sampling.repetition_penalty)
    )
    tokens = (
        penalized.argmax(-1) if chance is None else draw_tokens(*candidate_weights(penalized, *sampling[:4]), chance)
    )
    return tokens, scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(-1)


def penalize_repetition(scores: Tensor, before: Tensor, repetition_penalty: float) -> Tensor:
    """Return scores (rows, vocab) in which those of the tokens `before` (rows, time) are smaller."""
    old = scores.gather(1, before)
    return scores.scatter(1, before, torch.where(old > 0, old / repetition_penalty, old * repetition_penalty))


def candidate_weights(
    scores: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """scores (rows, vocab) -> weights (rows, n) and ids (rows, n) of the tokens that may be drawn; ids are None where
    all may, in their order. The weights need not sum to 1."""
    weights = ((scores - scores.amax(-1, keepdim=True)) / temperature).softmax(-1)
    tokens = None
    vocab = weights.shape[-1]
    if 0 < top_k < vocab or top_p < 1:
        weights, tokens = weights.topk(min(top_k or vocab, vocab), -1)
    if top_p < 1:
        share = weights / weights.sum(-1, keepdim=True)
        weights = weights.masked_fill(share.cumsum(-1) - share >= top_p, 0.0)  # the token that reaches top_p stays
    if min_p:
        weights = weights.masked_fill(weights < min_p * weights.amax(-1, keepdim=True), 0.0)
    return weights, tokens


def draw_tokens(weights: Tensor, tokens: Tensor | None, noise: Tensor) -> Tensor:
    """Return the token at which the cumulative weight reaches the fraction `noise` (rows,), in (0, 1], of the total."""
    sums = weights.cumsum(-1)
    chosen = torch.searchsorted(sums, noise[:, None].to(sums.dtype) * sums[:, -1:])
    chosen = chosen.clamp(max=sums.shape[-1] - 1)  # NaN is reported later
    return (chosen if tokens is None else tokens.gather(1, chosen))[:, 0]


def uniform_noise(seeds: Seeds | None, rows: int, count: int, device: torch.device) -> Tensor:
    """Return random numbers in (0, 1], (rows, count), each row from its own seed, so that batching changes nothing."""
    if seeds is not None and len(seeds) != rows:
        raise UserError(f"sampling needs one seed for each row: {rows}, not {len(seeds)}")
    sources = [np.random.default_rng(seed) for seed in (seeds if seeds is not None else [None] * rows)]
    noise = torch.from_numpy(1 - np.stack([source.random(count) for source in sources]))
    return noise.float().to(device) if device.type == "mps" else noise.to(device)


def _filled_prefix(request: Request) -> Tensor:
    """Return the prefix with its first token in place of padding."""
    return request.prefix if request.valid is None else request.prefix.where(request.valid, request.prefix[:, :1])


def _checked(sampling: SamplingParams) -> SamplingParams:
    temperature, top_k, top_p, min_p, repetition_penalty = sampling
    if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1 and repetition_penalty > 0):
        raise UserError(
            "sampling needs temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1 and repetition_penalty > 0, "
            f"not {temperature:g}, {top_k}, {top_p:g}, {min_p:g} and {repetition_penalty:g}"
        )
    return sampling
