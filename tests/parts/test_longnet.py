"""LongNet: its receptive field, and branches that agree with one softmax in which a key counts once per branch."""

import pytest
import torch

from regard.core import Context, Mixer, Pattern, UserError, part
from regard.parts.patterns.segment import Segment


def make(kernel: str = "auto", **given) -> Mixer:
    torch.manual_seed(3)
    spec = {"part": "longnet", "segments": [16, 64, 160], "rates": [1, 4, 10], "kernel": kernel, **given}
    return part(Mixer, spec, width=24, heads=4)


def test_reaches_every_token():
    """With as many heads as the rate, the heads cover all positions, with both kinds of offsets."""
    for offsets, begins in (("turns", (0, 1, 2, 3)), ("groups", (0, 1, 2, 3))):
        mixer = make(segments=[4, 16], rates=[1, 4], offsets=offsets)
        assert str(mixer.pattern) == f"causal & comb(4, 1) | causal & comb(16, 4, {begins})"
        assert mixer.pattern.mask(16).any(0).tril().sum() == 16 * 5 / 2 + 24  # one's own tooth, and one's own segment
    assert make(segments=[8, 8], rates=[1, 2], offsets="groups").pattern.two.two.offsets == (0, 0, 1, 1)
    assert make(segments=[8, 8], rates=[1, 2]).pattern.two.two.offsets == (0, 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position", ["none", "rotary", "t5"])
def test_branches_agree_with_one_softmax(causal, position):
    """Longer than any segment, ragged, an empty row, packed documents: outputs and gradients."""
    valid = torch.arange(177)[None] < torch.tensor([177, 90, 0])[:, None]
    for packed in (None, Segment(torch.arange(177).div(50, rounding_mode="floor").expand(3, -1))):
        results = []
        for kernel in ("reference", "blocks"):
            mixer = make(kernel, causal=causal, position=position).double()
            x = torch.randn(3, 177, 24, dtype=torch.float64, requires_grad=True)
            y = mixer(x, Context.begin(3, 177, valid=valid, pattern=packed))
            assert bool(y.isfinite().all())
            torch.manual_seed(5)
            y[valid].backward(torch.randn_like(y[valid]))
            results.append([y[valid].detach(), x.grad, *(p.grad for p in mixer.parameters())])
        for one, two in zip(*results, strict=True):
            assert torch.allclose(one, two, rtol=1e-9, atol=1e-10)


def test_constant_shares_change_the_gradient_alone():
    results = []
    for shares in ("learned", "constant"):
        mixer = make("blocks", shares=shares)
        x = torch.randn(2, 77, 24)
        y = mixer(x, Context.begin(2, 77))
        y.sin().sum().backward()
        results.append((y.detach(), mixer.q.weight.grad, mixer.out.weight.grad))
    (y, dq, dout), (same, other, dout_too) = results
    assert torch.allclose(y, same, atol=1e-6)
    assert torch.allclose(dout, dout_too, atol=1e-5)
    assert not torch.allclose(dq, other, rtol=0.05)


def test_state_is_of_the_longest_segment():
    mixer = make()
    assert mixer.cost(1, 2000).state == mixer.cost(1, 100_000).state
    assert mixer.cost(1, 100_000).state < (160 + 64 + 2) * (2 * 24 * 4 + 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    exact, mixer = make("blocks"), make("blocks").to(dtype)
    x = torch.randn(1, 165, 24)
    want = exact(x, Context.begin(1, 165))
    y = mixer(x.to(dtype), Context.begin(1, 165))
    assert y.dtype == dtype
    assert torch.allclose(y.float(), want, atol=0.05)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"segments": [4], "rates": [1, 2]}, "1 segments, 2 rates"),
        ({"segments": [], "rates": []}, "0 segments, 0 rates"),
        ({"segments": [4, 8], "rates": [2, 4]}, "position 0 with nothing to attend to: give a branch rate 1"),
        ({"segments": [4, 8], "rates": [1, 9]}, "a comb of rate 9 does not fit into segments of 8"),
        ({"segments": [4, 0], "rates": [1, 1]}, "comb.segment must be at least 1"),
        ({"segments": [4, "8"], "rates": [1, 2]}, "comb.segment must be a whole number"),
        ({"offsets": "odd"}, "offsets must be 'turns' or 'groups'"),
        ({"shares": "none"}, "shares must be 'learned' or 'constant'"),
        ({"position": "shaw"}, "needs the attention weights"),
    ],
)
def test_refused(given, said):
    with pytest.raises(UserError, match=said):
        make(**given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("comb(8, 2, offsets=(0, 2))", "an offset of comb must be at most 1"),
        ("comb(8, 2, offsets=())", "lists where heads begin"),
        ("comb(8, 2, offsets=1)", "lists where heads begin"),
    ],
)
def test_combs_refused(text, said):
    with pytest.raises(UserError, match=said):
        Pattern.parse(text)
