"""Logits processors for Request: functions from logits and generated tokens to new logits.

Timestamps are tokens, later times having larger ids. By Whisper's rules they come in pairs, where one segment ends and
the next begins, never decrease, begin early, and are chosen when together they are more probable than any text token:

    logsumexp over timestamps of s  >  max over text tokens of s     =>     a timestamp comes next

Radford et al. 2022, arXiv:2212.04356.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .result import LogitsProcessor

MASKED = -torch.inf


def compose(rules: Sequence[LogitsProcessor]) -> LogitsProcessor | None:
    """Return a processor that applies all of these in order; None for none."""
    if not rules:
        return None

    def rule(scores: Tensor, generated: Tensor) -> Tensor:
        for one in rules:
            scores = one(scores, generated)
        return scores

    return rule


def suppress(tokens: Sequence[int]) -> LogitsProcessor:
    """Return a processor that forbids these tokens, where the vocabulary has them."""

    def rule(scores: Tensor, generated: Tensor) -> Tensor:
        there = [token for token in tokens if token < scores.shape[1]]
        return scores.index_fill(1, torch.tensor(there, dtype=torch.long, device=scores.device), MASKED)

    return rule


def merge_ends(end: int, others: Sequence[int]) -> LogitsProcessor:
    """Return a processor that gives `end` the largest score of itself and `others`, and forbids the others."""
    suppress_others = suppress(others)

    def rule(scores: Tensor, generated: Tensor) -> Tensor:
        there = [end, *(token for token in others if token < scores.shape[1])]
        scores = scores.index_copy(1, scores.new_tensor([end], dtype=torch.long), scores[:, there].amax(1, True))
        return suppress_others(scores, generated)

    return rule


def suppress_at_begin(tokens: Sequence[int]) -> LogitsProcessor:
    """Return a processor that forbids these tokens as the first one."""
    suppressed = suppress(tokens)
    return lambda scores, generated: scores if generated.shape[1] else suppressed(scores, generated)


def timestamps(first: int, end: int, latest: int | None = None) -> LogitsProcessor:
    """Return a processor with Whisper's rules for timestamps.

    first:  the token of time 0; all tokens from it on are timestamps.
    end:    the end token; text tokens are below it.
    latest: the largest number of steps after time 0 at which an answer may begin.
    """

    def rule(scores: Tensor, generated: Tensor) -> Tensor:
        length = generated.shape[1]
        number = torch.arange(scores.shape[1], device=scores.device)
        is_time = number >= first
        if not length:
            late = number > first + (len(number) if latest is None else latest)
            return _prefer_timestamps(scores.masked_fill(~is_time | late, MASKED), first)
        one = generated[:, -1] >= first
        two = one & (generated[:, -2] >= first) if length > 1 else one
        last = torch.where(generated >= first, generated, -1).amax(1)
        floor = torch.where(last < 0, first, last + torch.where(one & ~two, 0, 1))
        barred = is_time & (number < floor[:, None])
        barred |= two[:, None] & is_time | (one & ~two)[:, None] & (number < end)
        return _prefer_timestamps(scores.masked_fill(barred, MASKED), first)

    return rule


def _prefer_timestamps(scores: Tensor, first: int) -> Tensor:
    """Forbid text tokens where timestamps together are more probable than any of them."""
    wins = scores[:, first:].logsumexp(-1) > scores[:, :first].amax(-1)
    words = torch.arange(scores.shape[1], device=scores.device) < first
    return scores.masked_fill(wins[:, None] & words, MASKED)
