"""Caches that are no larger than needed, and sources that are held once."""

import pytest
import torch

from regard.bases.cache import Source, write
from regard.core import build, select


def test_a_cache_that_is_too_small_grows():
    """As it does after rows were chosen, when only what is used is kept."""
    model = build("gpt2", size="tiny", vocab=61).eval()
    tokens = torch.randint(61, (3, 40))
    with torch.no_grad():
        state, found = model.start(3, 2), []
        for begin, end in ((0, 1), (1, 20), (20, 21), (21, 40)):
            scores, state = model.step(tokens[:, begin:end], state)
            found.append(scores)
        assert torch.cat(found, 1) == pytest.approx(model(tokens), abs=1e-4)


def test_a_source_is_shared_by_rows_and_let_go():
    """What decoding relies on: rows that look at one source hold it once."""
    keys = torch.arange(3.0).view(3, 1, 1, 1)
    source = Source(keys, keys, torch.zeros(3, 1, dtype=torch.long), torch.arange(3))
    beams = select(source, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert beams.keys is keys
    assert beams.materialize() is beams
    left = select(beams, torch.tensor([5, 4, 1, 0])).materialize()
    assert left.keys.flatten().tolist() == [2, 0]
    assert left.rows.tolist() == [0, 0, 1, 1]
    odd = select(beams, torch.tensor([0, 2, 3])).materialize()
    assert odd.keys.flatten().tolist() == [0, 1, 1]


@pytest.mark.parametrize("slots", [[[3], [3], [3]], [[3], [0], [4]], [[1, 2], [0, 4], [2, 3]]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_row_writes_into_its_own_slot(slots, dtype):
    held, slot = torch.zeros(3, 5, 2), torch.tensor(slots)
    new = torch.randn(3, slot.shape[1], 2, dtype=dtype)
    expected = held.clone()
    for row in range(3):
        for i, at in enumerate(slots[row]):
            expected[row, at] = new[row, i]
    assert torch.equal(write(held, slot, new), expected)
    learned = write(torch.zeros(3, 5, 2), slot, new.requires_grad_())
    assert torch.equal(learned, expected)
    learned.sum().backward()
    assert torch.equal(new.grad, torch.ones_like(new))
