"""The oracle of edits: the fewest that turn any canvas into the target."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from regard.ops.edits import insertions, kept

tokens = st.lists(st.integers(0, 3), max_size=9)


def apply(canvas, target):
    """Delete what the oracle says, then insert as many places as it says, and fill them with what the target has."""
    left = [t for t, keep in zip(canvas, kept(canvas, target), strict=True) if keep]
    counts = insertions(left, target)
    made = []
    for count, token in zip(counts, [*left, None], strict=True):
        made += target[len(made) : len(made) + count]
        made += [] if token is None else [token]
    return made, len(canvas) - len(left) + sum(counts)


def fewest(canvas, target):
    """By enumeration: the longest subsequence of the canvas that is one of the target."""
    for size in range(min(len(canvas), len(target)), -1, -1):
        of_target = set(combinations(target, size))
        if any(one in of_target for one in combinations(canvas, size)):
            return len(canvas) + len(target) - 2 * size
    raise AssertionError


@given(tokens, tokens)
def test_edits_turn_any_canvas_into_the_target_with_the_least_number(canvas, target):
    made, edits = apply(canvas, target)
    assert made == target
    assert edits == fewest(canvas, target)


def test_all_short_pairs():
    for n, m in product(range(4), repeat=2):
        for canvas in product(range(2), repeat=n):
            for target in product(range(2), repeat=m):
                made, edits = apply(list(canvas), list(target))
                assert made == list(target)
                assert edits == fewest(canvas, target)
