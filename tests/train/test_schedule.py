"""The learning rate over a run."""

import math

import pytest

from regard.train.schedule import factor


def test_as_in_2017():
    """lrate = width^-0.5 min(step^-0.5, step warmup^-1.5), whose peak is (width warmup)^-0.5."""
    width, warmup = 512, 40
    peak = (width * warmup) ** -0.5
    for step in range(1, 300):
        wanted = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert peak * factor("inverse_sqrt", step, warmup, step / 300) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("kind", ["inverse_sqrt", "cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_warms_up_to_the_peak(kind, warmup):
    rates = [factor(kind, step, warmup, step / 50) for step in range(1, 51)]
    assert rates[:warmup] == pytest.approx([step / warmup for step in range(1, warmup + 1)])
    assert all(a >= b for a, b in zip(rates[max(warmup - 1, 0) :], rates[max(warmup, 1) :], strict=False))
    assert max(rates) <= 1
    if warmup:
        assert rates[warmup - 1] == 1


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_down_to_the_floor(floor):
    total, warmup = 60, 20
    for step in range(warmup, total + 1):
        after = (step - warmup) / (total - warmup)
        linear = floor + (1 - floor) * (1 - after)
        cosine = floor + (1 - floor) * (1 + math.cos(math.pi * after)) / 2
        assert factor("linear", step, warmup, step / total, floor) == pytest.approx(linear)
        assert factor("cosine", step, warmup, step / total, floor) == pytest.approx(cosine, abs=1e-12)
    assert factor("cosine", 70, warmup, 1.2, floor) == pytest.approx(floor)
    assert factor("constant", 70, warmup, 1.0, floor) == 1


def test_a_run_shorter_than_its_warm_up():
    assert factor("cosine", 30, 30, 1.0) == 0
    assert factor("linear", 1, 1, 1.0) == 0


@pytest.mark.parametrize("kind", ["inverse_sqrt", "cosine", "linear", "constant"])
@pytest.mark.parametrize("total", [2, 10, 100])
def test_no_run_ends_during_its_warm_up(kind, total):
    """The peak is reached by the middle of a run, however long a warm-up was asked for."""
    rates = [factor(kind, step, 4000, step / total) for step in range(1, total + 1)]
    assert rates[total // 2 - 1] == max(rates) == 1
    if kind in ("cosine", "linear"):
        assert rates[-1] == pytest.approx(0, abs=1e-12)
