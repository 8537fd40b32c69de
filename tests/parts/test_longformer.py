"""Longformer: hubs of the recipe and of the batch, and windows that stay linear beside them."""

import pytest
import torch

from regard.core import Context, Mixer, UserError, part
from regard.parts.patterns.segment import Segment


def make(**given) -> Mixer:
    torch.manual_seed(3)
    return part(Mixer, {"part": "longformer", "pattern": "window(4)", **given}, width=24, heads=3).double()


def reached(mixer: Mixer, time: int, segments: torch.Tensor | None = None) -> torch.Tensor:
    """(time, time): whether an output depends on an input."""
    x = torch.randn(1, time, 24, dtype=torch.float64, requires_grad=True)
    y = mixer(x, Context.begin(1, time, segments=segments))
    return torch.stack(
        [torch.autograd.grad(y[0, i].sum(), x, retain_graph=True)[0][0].abs().sum(-1) > 0 for i in range(time)]
    )


def test_who_looks_at_whom():
    segments = torch.zeros(1, 17, dtype=torch.long)
    segments[0, [3, 11]] = 2
    for mixer, told, hubs in (
        (make(hubs=2), None, [0, 1]),
        (make(hubs=2), segments, [0, 1]),
        (make(hubs=0, segment=2), segments, [3, 11]),
        (make(hubs=1, segment=2, kernel="blocks"), segments, [0, 3, 11]),
        (make(hubs=1, segment=2), None, [0]),
    ):
        at = torch.arange(17)
        want = (at[:, None] - at).abs() < 4
        want[hubs] = True
        want[:, hubs] = True
        assert torch.equal(reached(mixer, 17, told), want)


@pytest.mark.parametrize("position", ["none", "rotary", "alibi"])
def test_hubs_of_the_batch_are_hubs(position):
    """The same hubs by their places, by a segment in one softmax, and by a segment in two parts; ragged, packed."""
    valid = torch.arange(61)[None] < torch.tensor([61, 20, 0])[:, None]
    segments = (torch.arange(61) < 3).long().expand(3, -1)
    for packed in (None, Segment(torch.arange(61).div(30, rounding_mode="floor").expand(3, -1))):
        results = []
        for given in ({"hubs": 3}, {"hubs": 0, "segment": 1}, {"hubs": 0, "segment": 1, "kernel": "blocks"}):
            mixer = make(position=position, kv_heads=1, **given)
            x = torch.randn(3, 61, 24, dtype=torch.float64, requires_grad=True)
            y = mixer(x, Context.begin(3, 61, valid=valid, segments=segments, pattern=packed))
            assert bool(y.isfinite().all())
            y[valid].sin().sum().backward()
            results.append([y[valid].detach(), x.grad, *(p.grad for p in mixer.parameters())])
        for have in results[1:]:
            for one, two in zip(have, results[0], strict=True):
                assert torch.allclose(one, two, rtol=1e-9, atol=1e-11)


def test_hubs_have_maps_of_their_own():
    """The output of a hub depends on the projections of hubs, and the others do not."""
    mixer, x = make(hubs=2), torch.randn(1, 9, 24, dtype=torch.float64)
    before = mixer(x, Context.begin(1, 9))
    with torch.no_grad():
        mixer.hub.v.weight.mul_(2)
    changed = (mixer(x, Context.begin(1, 9)) != before).any(-1)[0]
    assert changed.tolist() == [True] * 2 + [False] * 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    x, told = torch.randn(2, 33, 24, dtype=torch.float64), torch.arange(33).expand(2, -1) % 7
    for kernel in ("auto", "blocks"):
        want = make(segment=3, kernel=kernel)(x, Context.begin(2, 33, segments=told))
        y = make(segment=3, kernel=kernel).to(dtype)(x.to(dtype), Context.begin(2, 33, segments=told))
        assert y.dtype == dtype
        assert torch.allclose(y.double(), want, atol=0.05)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hubs": 0}, "set hubs or segment, or use attention"),
        ({"hubs": -1}, "from 0 on"),
        ({"segment": -1}, "from 0 on"),
        ({"pattern": "window(0)"}, "window.size must be at least 1"),
        ({"pattern": "heads(window(2), stride(2), window(3), first(2))"}, "is for 4 heads, and there are 3"),
    ],
)
def test_refused(given, said):
    with pytest.raises(UserError, match=said):
        make(**given)


def test_a_neighbourhood_that_leaves_somebody_blind():
    mixer = make(pattern="~window(3)", hubs=0, segment=0)
    with pytest.raises(UserError, match="leaves position 0 with nothing to see"):
        mixer(torch.randn(1, 3, 24, dtype=torch.float64), Context.begin(1, 3))
