"""Batches stay within their budget, hold every example once per epoch, depend on the seed alone, and can resume
anywhere."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.core import UserError
from regard.data import IGNORE, BucketedBatches, ResumableBatches, WindowBatches, first_epoch
from regard.data.batches import pad_rows, plan_batches, teacher_forced

START, END, PAD = 2, 3, 0


class Made:
    """Pairs of sequences that hold their own index, so that rows are distinguishable."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths, np.int32)

    def __getitem__(self, index):
        return tuple(
            np.array([100 * index + column] * (n - 1) + [END], np.int32) for column, n in enumerate(self.lengths[index])
        )


def some(count=57, columns=2, seed=0):
    return Made(np.random.default_rng(seed).integers(1, 13, (count, columns)))


def same(one, other):
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))


@given(lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1), budget=st.integers(1, 100))
@settings(max_examples=100, deadline=None)
def test_budget(lengths, budget):
    """Rows times the longest side fit the budget, unless one example alone exceeds it; and no batch could be merged
    with the next."""
    sizes = np.array(lengths)
    batches = plan_batches(sizes, budget, np.random.default_rng(0))
    assert sorted(int(i) for batch in batches for i in batch) == list(range(len(sizes)))
    used = sorted((int(sizes[batch].max(1).min()), int(sizes[batch].max()), -len(batch)) for batch in batches)
    for _, longest, rows in used:
        assert -rows * longest <= budget or rows == -1
    for (_, _, rows), (shortest, _, _) in pairwise(used):
        assert (1 - rows) * shortest > budget


def test_like_with_like():
    """Batches have little padding."""
    data = some(3000)
    real = waste = 0
    for batch in first_epoch(BucketedBatches(data, 500, 1, START)):
        real += batch.count
        waste += batch.targets.numel() - batch.count
    assert waste < 0.2 * real


def test_one_batch():
    data = Made([(3, 5), (4, 2)])
    (batch,) = first_epoch(BucketedBatches(data, 100, 1, START, PAD))
    first, second = (1, 0) if batch.targets[0, 2] == IGNORE else (0, 1)
    assert batch.source[first].tolist() == [0, 0, END, PAD]
    assert batch.source[second].tolist() == [100, 100, 100, END]
    assert batch.source_valid[first].tolist() == [True, True, True, False]
    assert batch.targets[first].tolist() == [1, 1, 1, 1, END]
    assert batch.targets[second].tolist() == [101, END, IGNORE, IGNORE, IGNORE]
    assert batch.tokens[first].tolist() == [START, 1, 1, 1, 1]
    assert batch.tokens[second].tolist() == [START, 101, END, PAD, PAD]
    assert batch.valid[second].tolist() == [True, True, False, False, False]
    assert batch.count == 7


def test_masks():
    for batch in first_epoch(BucketedBatches(some(), 40, 1, START)):
        valid = batch.targets != IGNORE
        assert batch.count == int(valid.sum())
        assert torch.equal(valid, torch.ones_like(valid) if batch.valid is None else batch.valid)
        assert bool((valid[:, 1:] <= valid[:, :-1]).all()), "real columns first"
        assert torch.equal(batch.tokens[:, 1:][valid[:, 1:]], batch.targets[:, :-1][valid[:, 1:]]), "one behind"
        assert bool((batch.tokens[:, 0] == START).all())
        source = torch.ones_like(batch.source, dtype=torch.bool) if batch.source_valid is None else batch.source_valid
        last = source.sum(1, keepdim=True) - 1
        assert bool((batch.source.gather(1, last) == END).all())
        assert bool((batch.source[~source] == PAD).all())
        named = (batch.source[:, 0] != END) & (batch.targets[:, 0] != END)  # both sides hold the number of their pair
        assert torch.equal(batch.source[:, 0][named] // 100, batch.targets[:, 0][named] // 100)


def test_no_mask_when_full():
    (batch,) = first_epoch(BucketedBatches(Made([(4, 3), (4, 3)]), 100, 1, START))
    assert batch.valid is None
    assert batch.source_valid is None
    (alone,) = first_epoch(BucketedBatches(Made([(3,), (3,)]), 100, 1, START))
    assert alone.source is None


def numbers(batches, epoch):
    return [tuple(int(i) for i in batch) for batch in batches.epoch(epoch)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs(shuffle):
    data = some()
    batches = BucketedBatches(data, 40, 7, START, shuffle=shuffle)
    for epoch in (0, 1, 5):
        assert sorted(i for batch in numbers(batches, epoch) for i in batch) == list(range(57)), "every example once"
        assert numbers(batches, epoch) == numbers(BucketedBatches(data, 40, 7, START, shuffle=shuffle), epoch)
    assert numbers(batches, 0) != numbers(batches, 1)
    assert numbers(batches, 0) != numbers(BucketedBatches(data, 40, 8, START, shuffle=shuffle), 0)


def feeds():
    stream = np.arange(500, dtype=np.int32)
    return {"pairs": BucketedBatches(some(), 40, 7, START), "windows": WindowBatches(stream, 7, 4, 7)}


@pytest.mark.parametrize("kind", ["pairs", "windows"])
@pytest.mark.parametrize("stop", [0, 1, 5, "end", 40])
def test_resumes(kind, stop):
    """Resuming from epoch and index gives the same remaining batches, across the end of the epoch."""
    whole = ResumableBatches(feeds()[kind])
    size = whole.size
    taken = size if stop == "end" else stop
    for _ in range(taken):
        next(whole)
    again = ResumableBatches(feeds()[kind], whole.epoch, whole.index)
    for _ in range(size + 3):
        assert same(next(whole), next(again))
        assert (whole.epoch, whole.index) == (again.epoch, again.index)


def test_feed_counts():
    feed = ResumableBatches(feeds()["pairs"])
    seen = [next(feed) for _ in range(feed.size)]
    assert (feed.epoch, feed.index) == (0, len(seen))
    next(feed)
    assert (feed.epoch, feed.index) == (1, 1)


@given(length=st.integers(2, 90), context=st.integers(1, 30), rows=st.integers(1, 5), shuffle=st.booleans())
@settings(max_examples=100, deadline=None)
def test_windows(length, context, rows, shuffle):
    """Windows hold consecutive tokens, each a target at most once; less than one context is left out at either end."""
    stream = np.arange(length, dtype=np.int32)
    if length < context + 1:
        with pytest.raises(UserError, match="too short"):
            WindowBatches(stream, context, rows, 1)
        return
    batches = WindowBatches(stream, context, rows, 1, shuffle)
    for epoch in (0, 1):
        asked = []
        for starts in batches.epoch(epoch):
            batch = batches.make(starts)
            assert batch.tokens.shape == batch.targets.shape == (len(starts), context)
            assert len(starts) <= rows
            assert torch.equal(batch.tokens + 1, batch.targets)
            assert batch.count == batch.targets.numel()
            asked += batch.targets.flatten().tolist()
        assert len(asked) == len(set(asked))
        offset = min(asked) - 1
        assert 0 <= offset < context if shuffle else offset == 0
        assert len(asked) == (length - 1 - offset) // context * context, "to the end"


def test_nothing():
    with pytest.raises(UserError, match="no example"):
        BucketedBatches(Made(np.zeros((0, 2))), 40, 1, START)


def test_pad_rows():
    block, valid = pad_rows([np.array([5, 6]), np.array([], np.int32)], 9)
    assert block.tolist() == [[5, 6], [9, 9]]
    assert valid.tolist() == [[True, True], [False, False]]


def test_moves():
    (batch,) = first_epoch(BucketedBatches(Made([(3, 5), (4, 2)]), 100, 1, START))
    assert same(batch, batch.to("cpu"))


def test_parts_are_the_whole():
    """A split batch keeps all rows in order, pads no more than needed, and has the same number of targets."""
    rows = [(np.arange(4, 4 + a), np.arange(5, 5 + b)) for a, b in [(3, 9), (7, 2), (1, 1), (5, 5), (8, 3), (2, 2)]]
    batch = teacher_forced(rows, 1, 0)
    assert batch.positions == 6 * (batch.tokens.shape[1] + batch.source.shape[1])
    for most in (1, 20, 40, 1000):
        parts = batch.split(most)
        assert len(parts) == min(max(round(batch.positions / most), 1), 6)
        assert sum(part.count for part in parts) == batch.count
        at = 0
        for part in parts:
            for side, valid in (("tokens", "valid"), ("targets", "valid"), ("source", "source_valid")):
                whole, real = getattr(batch, side)[at : at + len(part.tokens)], getattr(batch, valid)
                got = getattr(part, side)
                assert torch.equal(got, whole[:, : got.shape[1]])
                assert len(parts) == 1 or got.shape[1] == int(real[at : at + len(got)].sum(1).max())
            at += len(part.tokens)
        assert at == 6
    assert batch._replace(stream_offset=3).split(1)[0].tokens is batch.tokens


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_no_more_rows_than_are_asked_for(rows):
    """A batch has at most `rows` rows, and no more tokens than the budget."""
    lengths = np.random.default_rng(0).integers(1, 30, (200, 1))
    batches = plan_batches(lengths, 100, np.random.default_rng(1), rows)
    assert sorted(number for batch in batches for number in batch) == list(range(200))
    assert max(len(batch) for batch in batches) <= rows
    assert all(len(batch) * lengths[batch].max() <= 100 for batch in batches)
    assert rows > 3 or max(len(batch) for batch in batches) == rows
