"""The Evolved Transformer's convolutions, and two mixers whose outputs are added."""

import pytest
import torch
import torch.nn.functional as F

from regard.core import Context, Memory, Mixer, Place, UserError, part
from regard.verify import laws

DECODER = {
    "left": {"size": 11, "times": 2, "separable": True, "activation": "relu"},
    "right": {"size": 7, "times": 0.5, "separable": True},
    "last": {"size": 7, "separable": True},
}
ENCODER = {
    "left": {"times": 4, "activation": "relu"},
    "right": {"size": 3, "times": 0.5, "activation": "relu"},
    "last": {"size": 9, "times": 0.5, "separable": True},
    "causal": False,
}


def make(table: dict, width: int = 10) -> Mixer:
    torch.manual_seed(0)
    return part(Mixer, {"part": "conv_branches", **table}, width=width).eval()


def by_hand(one, u, causal):
    """u (time, channels) -> (time, out), position by position."""
    reach = one.size - 1 if causal else one.size // 2
    found = []
    for at in range(len(u)):
        total = torch.zeros(one.kernel.out_channels, dtype=u.dtype) if one.map else one.kernel.bias.clone()
        for offset in range(one.size):
            where = at - reach + offset
            if 0 <= where < len(u):
                weight = one.kernel.weight[..., offset]
                total = total + (weight[:, 0] * u[where] if one.map else weight @ u[where])
        found.append(one.activate(one.map(total) if one.map else total))
    return torch.stack(found)


@pytest.mark.parametrize("table", [DECODER, ENCODER])
def test_position_by_position(table):
    mixer, causal = make(table).double(), table.get("causal", True)
    x = torch.randn(13, 10, dtype=torch.float64)
    with torch.no_grad():
        left, right = by_hand(mixer.left, x, causal), by_hand(mixer.right, x, causal)
        u = left + F.pad(right, (0, left.shape[1] - right.shape[1]))
        want = by_hand(mixer.last, mixer.norm(u), causal)
        found = mixer(x[None], Context.begin(1, 13))[0]
    assert want.shape[1] == (10 if causal else 5)
    assert laws.max_difference(found[:, : want.shape[1]], want) < 1e-12
    assert bool((found[:, want.shape[1] :] == 0).all())


@pytest.mark.parametrize("table", [DECODER, ENCODER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_nothing_is_finite(table, dtype):
    mixer = make(table).to(dtype)
    valid = torch.arange(13)[None] < torch.tensor([[13], [0], [4]])
    with torch.no_grad():
        y = mixer(torch.randn(3, 13, 10, dtype=dtype), Context.begin(3, 13, valid=valid))
    assert y.dtype == dtype
    assert bool(torch.isfinite(y).all())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"left": {"sise": 3}}, "left has no 'sise'; did you mean 'size'"),
        ({"left": {"size": 0}}, "must give at least one channel"),
        ({"right": {"times": 0.01}}, "must give at least one channel"),
        ({"last": {"times": 2}}, "last has 20 output channels, more than the width of 10"),
        ({"causal": False, "right": {"size": 4}}, "must be odd"),
        ({"left": 3}, "must be a table"),
        ({"left": {"activation": "rulu"}}, "did you mean 'relu'"),
    ],
)
def test_bad_arguments(change, sentence):
    with pytest.raises(UserError, match=sentence):
        make(DECODER | change)


def test_what_looks_ahead_does_not_step():
    mixer = make(ENCODER)
    with pytest.raises(UserError, match="look ahead"):
        mixer.step(torch.randn(2, 3, 10), mixer.start(Context.begin(2, 0), 3), Context.begin(2, 3))


def test_a_sum_is_the_sum():
    torch.manual_seed(0)
    spec = {"part": "sum", "left": {"part": "attention", "heads": 6}, "right": {"part": "attention", "over": "memory"}}
    mixer = part(Mixer, spec, width=24, heads=3, place=Place(memory=24)).eval()
    x, context = torch.randn(2, 13, 24), Context.begin(2, 13, memory=Memory(torch.randn(2, 7, 24)))
    assert mixer.left.heads == 6
    assert mixer.right.heads == 3
    with torch.no_grad():
        want = mixer.left(x, context) + mixer.right(x, context)
        assert torch.equal(mixer(x, context), want)


def test_a_sum_of_different_widths_is_refused():
    with pytest.raises(UserError, match="left has 24 output channels and right 48"):
        part(Mixer, {"part": "sum", "left": "mean", "right": {"part": "gru", "hidden": 48}}, width=24, heads=3)
    with pytest.raises(UserError, match="unknown mixer 'men'"):
        part(Mixer, {"part": "sum", "left": "men", "right": "mean"}, width=24, heads=3)
