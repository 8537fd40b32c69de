"""A vocabulary, sorted by frequency, in groups of which each has fewer channels than the one before."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from regard.core import UserError


class Group(NamedTuple):
    """One of them: tokens from `begin` to before `end`, with vectors of `dim` channels."""

    begin: int
    end: int
    dim: int

    @classmethod
    def of(cls, vocab: int, cutoffs: list, divide: int, channels: int) -> list[Group]:
        """cutoffs: the first token of every group after the first one."""
        ends = [0, *cutoffs, vocab]
        if any(not isinstance(end, int) or begin >= end for begin, end in pairwise(ends)):
            raise UserError(f"cutoffs must rise from 1 to below the {vocab} tokens of the vocabulary, not {cutoffs}")
        if divide < 1 or channels // divide ** len(cutoffs) < 1:
            raise UserError(f"{channels} channels cannot be divided by {divide} at each of {len(cutoffs)} cutoffs")
        return [cls(ends[i], ends[i + 1], channels // divide**i) for i in range(len(ends) - 1)]
