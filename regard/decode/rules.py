"""What may be said next: functions for Request.rule, from scores and from what each row has said to other scores.

Timestamps are tokens like others, the later time the larger number. By Whisper's rules they come in pairs, where one
piece ends and the next begins, never go back, begin early, and win when together they are likelier than any word:

    logsumexp over times of s  >  max over words of s     =>     a time is said

Radford et al. 2022, arXiv:2212.04356.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .result import Rule

NEVER = -torch.inf


def together(rules: Sequence[Rule]) -> Rule | None:
    """All of them, in this order."""
    if not rules:
        return None

    def rule(scores: Tensor, said: Tensor) -> Tensor:
        for one in rules:
            scores = one(scores, said)
        return scores

    return rule


def never(tokens: Sequence[int]) -> Rule:
    """These are not said, where the vocabulary has them."""

    def rule(scores: Tensor, said: Tensor) -> Tensor:
        there = [token for token in tokens if token < scores.shape[1]]
        return scores.index_fill(1, torch.tensor(there, dtype=torch.long, device=scores.device), NEVER)

    return rule


def as_one(end: int, others: Sequence[int]) -> Rule:
    """Any of the others ends an answer as `end` does: it has the score of the likeliest, and they are not said."""
    silent = never(others)

    def rule(scores: Tensor, said: Tensor) -> Tensor:
        there = [end, *(token for token in others if token < scores.shape[1])]
        scores = scores.index_copy(1, scores.new_tensor([end], dtype=torch.long), scores[:, there].amax(1, True))
        return silent(scores, said)

    return rule


def not_first(tokens: Sequence[int]) -> Rule:
    """These are not said at the beginning."""
    later = never(tokens)
    return lambda scores, said: scores if said.shape[1] else later(scores, said)


def times(first: int, end: int, latest: int | None = None) -> Rule:
    """first: the token of time 0; all from there on are times. end: the end mark; words are below it. latest: the
    largest number of steps after 0 at which an answer may begin."""

    def rule(scores: Tensor, said: Tensor) -> Tensor:
        length = said.shape[1]
        number = torch.arange(scores.shape[1], device=scores.device)
        is_time = number >= first
        if not length:
            late = number > first + (len(number) if latest is None else latest)
            return _likelier(scores.masked_fill(~is_time | late, NEVER), first)
        one = said[:, -1] >= first
        two = one & (said[:, -2] >= first) if length > 1 else one
        last = torch.where(said >= first, said, -1).amax(1)
        floor = torch.where(last < 0, first, last + torch.where(one & ~two, 0, 1))
        barred = is_time & (number < floor[:, None])
        barred |= two[:, None] & is_time | (one & ~two)[:, None] & (number < end)
        return _likelier(scores.masked_fill(barred, NEVER), first)

    return rule


def _likelier(scores: Tensor, first: int) -> Tensor:
    """Without words where times together are likelier than any of them."""
    wins = scores[:, first:].logsumexp(-1) > scores[:, :first].amax(-1)
    words = torch.arange(scores.shape[1], device=scores.device) < first
    return scores.masked_fill(wins[:, None] & words, NEVER)
