"""What a column of a table holds, by its cells: labels, tags of words, numbers of lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

LABEL = 60  # characters of a label, at the most and in the mean
FEW = 20  # different answers that are labels even in a short file, and even if they are numbers such as 2.5
COUNTED = 3  # lines, from which on numbers that grow may be those of the lines
SPAN = re.compile("[BIESLU]-.+")  # a tag of words that belong together


def are_labels(answers: Sequence[str]) -> bool:
    """Return whether these are short, and the same ones again and again."""
    distinct = len({answer.strip() for answer in answers})
    brief = sum(map(len, answers)) <= LABEL * len(answers)
    return brief and (distinct <= len(answers) / 10 or (distinct <= FEW and distinct < len(answers) / 2))


def numbering(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the columns that hold nothing but whole numbers, each larger than the one before."""
    if len(rows) < COUNTED:
        return []
    columns = [[cell.strip() for cell in column] for column in zip(*rows, strict=True)]
    return [
        at
        for at, cells in enumerate(columns)
        if all(cell.isascii() and cell.isdigit() for cell in cells)
        and all(int(one) < int(two) for one, two in pairwise(cells))
    ]


def are_tags(rows: Sequence[tuple[str, ...]]) -> bool:
    """Return whether the second cells are the tags of the words in the first: in every row as many, and all in all few
    different ones, or tags of spans such as B-PER."""
    words, tags = ([row[column].split() for row in rows] for column in (0, 1))
    if any(len(one) != len(two) for one, two in zip(words, tags, strict=True)):
        return False
    if 2 * sum(len(some) > 1 for some in words) < len(rows) or len(rows) < COUNTED:
        return False
    known, met = ({word for some in side for word in some} for side in (tags, words))
    few = 2 * len(known) <= len(met) and 5 * len(known) <= sum(map(len, tags))
    return few or ("O" in known and any(map(SPAN.fullmatch, known)))
