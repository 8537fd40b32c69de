"""Every pair of values of two parameters is tested, and few cases more."""

from itertools import product

import pytest

from tests.pairwise import covering, pairs

SIZES = [(3,), (2, 5), (2, 2, 2), (7, 3, 2, 2, 2, 3), (6, 6, 2, 2, 3), (1, 4, 3)]


@pytest.mark.parametrize("sizes", SIZES)
def test_every_pair_is_covered(sizes):
    cases = [dict(zip("abcdef", values, strict=False)) for values in product(*map(range, sizes))]
    chosen = [cases[number] for number in covering(cases)]
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, cases))
    largest = sorted(sizes)[-1] * (sorted(sizes)[-2] if len(sizes) > 1 else 1)
    assert largest <= len(chosen) <= 1.4 * largest


def test_what_is_left_out_is_left_out():
    """A product with holes, as after -k, keeps the pairs that it has."""
    cases = [{"a": a, "b": b, "c": c} for a, b, c in product(range(3), repeat=3) if (a, b) != (1, 2)]
    chosen = [cases[number] for number in covering(cases)]
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, cases))
    assert len(chosen) < len(cases) / 2


@pytest.mark.pairwise
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize(("b", "c"), [(4, 5), (6, 7)])
@pytest.mark.parametrize("d", [8, 9])
def test_marked(a, b, c, d, request):
    """The mark thins what pytest collects; parameters of one tuple are one."""
    cases = [item.callspec.params for item in request.session.items if item.originalname == "test_marked"]
    assert len(cases) in (1, 6, 7)  # alone, if it was asked for by name
    assert len(cases) == 1 or {(3, 8), (3, 9), (2, 8)} <= {(case["a"], case["d"]) for case in cases}
