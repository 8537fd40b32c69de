"""Thin the product of a test's parametrizations to a covering array: every two values of two parameters meet.

Nearly all bugs that depend on parameters depend on one or two of them (Kuhn, Wallace and Gallo 2004), and seven sizes,
six kinds, two dtypes, two numbers of threads and three CPUs meet in pairs in some fifty cases instead of 500.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest


def pairs(case: Mapping[str, Hashable]) -> set[tuple]:
    """Return every pair of (parameter, value) that occurs in a case; of one parameter alone, that one."""
    return set(combinations(sorted(case.items()), min(2, len(case))))


def covering(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Return the numbers of few cases that have every pair there is in all; greedy, and the same every time."""
    left = {number: pairs(case) for number, case in enumerate(cases)}
    chosen = []
    while left:
        best = max(left, key=lambda number: (len(left[number]), -number))
        seen = left.pop(best)
        chosen.append(best)
        left = {number: fresh for number, old in left.items() if (fresh := old - seen)}
    return sorted(chosen)


def values(item: pytest.Function) -> dict[str, tuple]:
    """Return which value each parameter of a case has, by identity; arguments that are given as tuples are one."""
    params = dict(item.callspec.params)
    grouped = [marker.args[0] for marker in item.iter_markers("parametrize")]
    grouped = [names.replace(" ", "").split(",") if isinstance(names, str) else names for names in grouped]
    together = {",".join(names): tuple(id(params.pop(name)) for name in names) for names in grouped}
    return together | {name: (id(value),) for name, value in params.items()}  # what is left comes from fixtures


def thin(items: list[pytest.Function]) -> tuple[list[pytest.Function], list[pytest.Function]]:
    """Return the items to run, and those cases of tests marked `pairwise` that have no pair of their own."""
    tests: dict[tuple, list[int]] = {}
    for number, item in enumerate(items):
        if item.get_closest_marker("pairwise"):
            tests.setdefault((item.path, item.parent.name, item.originalname), []).append(number)
    dropped = set()
    for numbers in tests.values():
        kept = covering([values(items[number]) for number in numbers])
        dropped |= set(numbers) - {numbers[place] for place in kept}
    return [item for n, item in enumerate(items) if n not in dropped], [items[n] for n in sorted(dropped)]
