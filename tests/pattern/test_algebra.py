"""What is derived from a pattern: blind queries, pairs, expiry of keys, slots of a cache."""

import pytest
import torch
from torch import Tensor

from regard.core import Pattern, UserError
from regard.parts.patterns.causal import Causal
from regard.parts.patterns.padding import Padding
from regard.parts.patterns.segment import Segment
from regard.pattern import analysis as patterns
from regard.pattern.algebra import cycle
from regard.pattern.analysis import expiry, first_blind_query, pairs, round_up_length, slots

parse = Pattern.parse


def brute_blind(pattern: Pattern, length: int, valid: Tensor | None) -> int | None:
    at = torch.arange(length)
    seen = pattern.allows(at[None, None, :, None], at[None, None, None, :])
    if valid is not None:
        seen = seen & valid[:, None, None, :]
    lost = ~seen.any(-1)
    if valid is not None:
        lost = lost & valid[:, None]
    lost = lost.flatten(0, 1).any(0).nonzero()
    return int(lost[0]) if len(lost) else None


BLIND = [
    ("causal", 13),
    ("causal & ~window(1)", 13),
    ("causal & window(5) & first(300)", 700),
    ("causal & window(5) & first(300)", 304),
    ("causal & window(5) & first(300)", 305),
    ("causal & ~window(1) | first(1)", 600),
    ("last(4, of=32)", 32),
    ("last(4, of=32)", 28),
    ("last(4, of=32)", 29),
    ("~block(6)", 6),
    ("~block(6)", 7),
    ("heads(causal, causal & ~window(1) | first(1), window(3) & ~window(1))", 2),
    ("heads(causal, window(3) & ~window(1))", 1),
    ("random_blocks(1, 4, of=40) & causal", 40),
    ("everything", 0),
]


@pytest.mark.parametrize(("text", "length"), BLIND)
def test_blind(text, length):
    torch.manual_seed(0)
    pattern = parse(text)
    assert first_blind_query(pattern, length) == brute_blind(pattern, length, None)
    if length:
        valid = torch.arange(length)[None] < torch.tensor([length, (length + 1) // 2, 1])[:, None]
        data = pattern & Padding(torch.tensor([length, length, 1]))
        if not pattern.causal:
            assert first_blind_query(pattern, length, valid) == brute_blind(pattern, length, valid)
        assert first_blind_query(data, length, valid) == brute_blind(data, length, valid)


def test_blind_tells_rows_that_do_not_fit():
    with pytest.raises(UserError, match="is for 2 sequences, and the batch has 3"):
        first_blind_query(Segment(torch.zeros(2, 5, dtype=torch.long)), 5, torch.ones(3, 5, dtype=torch.bool))


PAIRS = [
    "causal",
    "everything",
    "window(7)",
    "causal & (window(9) | first(3) | stride(64))",
    "heads(causal & window(5), causal, stride(3))",
    "fixed(16, 2, 4) & causal",
    "~causal",
    "global_tokens(2) | random_blocks(2, 8)",
]


@pytest.mark.parametrize("text", PAIRS)
def test_pairs(text):
    pattern = parse(text)
    mask = pattern.mask(531).float()
    assert pairs(pattern, 531) == pytest.approx(float(mask.mean(0).sum()))
    assert pairs(pattern, 300, 231) == pytest.approx(float(mask[:, 231:].mean(0).sum()))
    assert pairs(pattern, 1, 530) == pytest.approx(float(mask[:, 530:].mean(0).sum()))
    five = mask[torch.arange(5) % len(mask)] if len(mask) > 1 else mask
    assert pairs(pattern, 531, heads=5) == pytest.approx(float(five.mean(0).sum()))


def test_pairs_of_long_sequences():
    """Closed forms, at lengths where the square is large."""
    n, size = 16384, 256
    assert pairs(parse("causal & window(256)"), n) == n * size - size * (size - 1) // 2
    assert (
        pairs(parse("causal & (window(256) | first(4))"), n) == n * size - size * (size - 1) // 2 + 4 * (n - size) - 6
    )
    n = 8192
    assert pairs(parse("causal"), n) == n * (n + 1) // 2
    assert pairs(parse("everything"), n) == n * n
    assert first_blind_query(parse("everything"), n) is None
    assert first_blind_query(parse("causal & stride(512)"), n) is None


def test_data_of_a_batch():
    """A mean over its rows, and never remembered: batches come and go."""
    pattern = Causal() & Padding(torch.tensor([3, 5]))
    before = [f.cache_info().currsize for f in (patterns._pairs, patterns._find_blind_cached)]
    assert pairs(pattern, 5) == (12 + 15) / 2
    assert pairs(pattern, 0) == 0
    assert first_blind_query(pattern, 5) is None
    assert before == [f.cache_info().currsize for f in (patterns._pairs, patterns._find_blind_cached)]


def test_expiry():
    assert expiry(parse("causal & window(4)"), 9).tolist() == [4, 5, 6, 7, 8, 9, 9, 9, 9]
    assert expiry(parse("causal & block(4)"), 9).tolist() == [4, 4, 4, 4, 8, 8, 8, 8, 9]
    assert expiry(parse("causal & (window(2) | first(2))"), 6).tolist() == [6, 6, 4, 5, 6, 6]
    assert expiry(parse("causal & dilated(3, 2)"), 9).tolist() == [5, 6, 7, 8, 9, 9, 9, 9, 9]
    assert expiry(parse("causal & (window(2) | fixed(4, 1))"), 9).tolist() == [4, 4, 4, 9, 8, 8, 8, 9, 9]
    assert expiry(parse("causal"), 5).tolist() == [5] * 5


@pytest.mark.parametrize("text", ["causal & window(5)", "causal & (block(16) | first(3))", "causal"])
def test_slots_of_a_shorter_sequence(text):
    """A longer table begins with the shorter one, so that a cache may be asked about either."""
    short, long = slots(parse(text), 100, 7), slots(parse(text), 700, 7)
    assert len(short.table) == round_up_length(100) == 256
    assert len(long.table) == round_up_length(700) == 1024
    assert torch.equal(long.table[:256], short.table)
    assert long.counts[:256] == short.counts
    assert min(long.reused, 256) == short.reused


def test_slots_are_few():
    assert slots(parse("causal & window(5)"), 1000, 8).counts[-1] == 5 + 8 - 1
    assert slots(parse("causal & (window(5) | first(3))"), 1000, 1).counts[-1] == 5 + 3
    assert slots(parse("causal"), 256, 8).counts[-1] == 256


def test_cycle():
    allowed = torch.rand(2, 3, 5, 7) < 0.5
    assert torch.equal(cycle(allowed, 3), allowed)
    assert torch.equal(cycle(allowed, 7), allowed[:, [0, 1, 2, 0, 1, 2, 0]])
    assert torch.equal(cycle(allowed, 2), allowed[:, :2])
    assert torch.equal(cycle(allowed[:, :1], 7), allowed[:, :1])
