"""The fewest insertions and deletions that turn one sequence into another: what an editing decoder learns from.

    distance = n + m - 2 lcs        the tokens of a longest common subsequence are kept

First all other tokens of the canvas are deleted, then the missing ones are inserted. Levenshtein 1966; Gu et al. 2019,
"Levenshtein Transformer", arXiv:1905.11006.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def kept(canvas: Sequence[int], target: Sequence[int]) -> list[bool]:
    """Return for each token of the canvas whether it is kept: it stands in one longest common subsequence, the one that
    keeps tokens as early as possible."""
    a, b = np.asarray(canvas), np.asarray(target)
    table = np.zeros((len(a) + 1, len(b) + 1), dtype=np.int64)  # of what is left of both: lcs(a[i:], b[j:])
    for i in range(len(a) - 1, -1, -1):
        row, below = table[i], table[i + 1]
        best = np.maximum(below[:-1], np.where(b == a[i], below[1:] + 1, 0))
        row[:-1] = np.maximum.accumulate(best[::-1])[::-1]
    found, j = [], 0
    for i, token in enumerate(a):
        places = np.nonzero(b[j:] == token)[0]
        keep = len(places) > 0 and bool(table[i + 1, j + places[0] + 1] + 1 == table[i, j])
        found.append(keep)
        if keep:
            j += int(places[0]) + 1
    return found


def insertions(canvas: Sequence[int], target: Sequence[int]) -> list[int]:
    """Return how many tokens of the target are missing before each token of the canvas, and after the last one:
    len(canvas) + 1 numbers. The canvas must be a subsequence of the target."""
    counts, at = [], 0
    for token in canvas:
        begin = at
        while target[at] != token:
            at += 1
        counts.append(at - begin)
        at += 1
    return [*counts, len(target) - at]
