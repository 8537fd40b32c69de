"""Steps cut at the ends of segments: nothing is lost, nothing is taken twice, and no turn crosses an end."""

import pytest
import torch

from regard.bases.segments import cut, join, pieces, turns
from regard.core import Context


def contexts(batch: int, time: int):
    """Rows at one place, at several, some with nothing to take, and a fresh one."""
    lengths = torch.randint(0, time + 1, (batch,))
    valid = torch.arange(time) < lengths[:, None]
    yield Context.begin(batch, time)
    yield Context.begin(batch, time, valid=valid)
    yield Context.after(torch.full((batch,), 11), time)
    yield Context.after(torch.randint(0, 50, (batch,)), time)
    yield Context.after(torch.randint(0, 50, (batch,)), time, valid=valid)
    yield Context.after(torch.randint(0, 50, (batch,)), time, valid=torch.zeros_like(valid))


@pytest.mark.parametrize("segment", [1, 3, 7, 64])
@pytest.mark.parametrize("time", [1, 5, 23])
def test_every_column_once(segment, time):
    torch.manual_seed(segment + time)
    for context in contexts(4, time):
        x = context.positions[..., None].double()  # so that a value tells its place
        made = turns(context, segment)
        taken = torch.zeros(4, dtype=torch.long)
        for turn, mine in zip(made, cut(x, made), strict=True):
            assert mine.shape == (4, turn.size, 1)
            real = mine[..., 0][turn.valid]
            assert torch.equal(real % segment, turn.at.expand(4, -1)[turn.valid])
            assert bool((turn.inside + turn.count <= segment).all())
            assert int((turn.inside + turn.count).max()) <= turn.end <= segment
            some = turn.count > 0
            assert torch.equal(turn.begin[some], (context.positions[:, 0] + taken)[some])
            assert not turn.opens or not turn.inside[some].any()
            taken = taken + turn.count
        assert torch.equal(taken, context.lengths)
        together = join(list(cut(x, made)), made, context)
        valid = torch.ones(4, time, dtype=torch.bool) if context.valid is None else context.valid
        assert together.shape == x.shape
        assert torch.equal(together[valid], x[valid])


def test_rows_take_turns_together():
    """As many turns as the row that crosses most ends, not one for every end of any row."""
    context = Context.after(torch.tensor([0, 1, 2, 3]), 9)
    assert len(turns(context, 4)) == 3
    assert len(turns(Context.begin(4, 9), 4)) == 3
    assert len(turns(Context.after(torch.tensor([0, 1, 2, 3]), 1), 4)) == 1


@pytest.mark.parametrize("time", [1, 4, 9])
def test_pieces(time):
    context = Context.after(torch.tensor([3, 5]), time, valid=torch.arange(time) < torch.tensor([[time], [2]]))
    x = torch.randn(2, time, 3)
    found = list(pieces(x, context, 4))
    assert [len(piece[0]) for piece, _ in found] == [min(4, time - begin) for begin in range(0, time, 4)]
    assert torch.equal(torch.cat([piece for piece, _ in found], 1), x)
    assert torch.equal(torch.cat([within.positions for _, within in found], 1), context.positions)
    assert torch.equal(torch.cat([within.valid for _, within in found], 1), context.valid)
