"""The laws of norms, over every file in parts/norms, in every variant that it names."""

import pytest
import torch
from torch import nn

from regard.core import Norm, UserError, part
from regard.schema import find, names

WIDTH, BATCH, TIME = 24, 3, 7
VARIANTS = [(name, index) for name in names(Norm) for index in range(len(find(Norm, name).examples))]
APPROXIMATE = {"power"}  # whose backward is not the derivative of its forward
LENGTHS = torch.tensor([TIME, 4, 1])
VALID = torch.arange(TIME)[None] < LENGTHS[:, None]


def make(name: str, index: int, training: bool) -> Norm:
    """A norm with parameters and running statistics that differ from their initial values."""
    torch.manual_seed(index)
    norm = part(Norm, {"part": name, **find(Norm, name).examples[index]}, width=WIDTH).double()
    with torch.no_grad():
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.2 * torch.rand_like(tensor))
    return norm.train(training)


def inputs() -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64) * 2 + 0.7


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "index"), VARIANTS)
def test_shape_and_dtype(name, index, training):
    norm = make(name, index, training)
    for valid in (None, VALID):
        y = norm(inputs(), valid)
        assert y.shape == (BATCH, TIME, WIDTH)
        assert y.dtype == torch.float64
        assert bool(torch.isfinite(y).all())
    assert norm.float()(inputs().float()).dtype == torch.float32


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "index"), VARIANTS)
def test_padding_changes_nothing(name, index, training):
    """Neither the values nor the amount of padding matter, over three steps, gradients and running statistics
    included."""

    def run(garbage: float, more: int) -> list[torch.Tensor]:
        valid = nn.functional.pad(VALID, (0, more))
        norm, seen = make(name, index, training), []
        for step in range(3):
            x = inputs() * (step + 1)
            torch.manual_seed(step)
            cotangent = torch.randn_like(x)
            x = nn.functional.pad(x, (0, 0, 0, more))
            x = torch.where(valid[..., None], x, garbage * torch.randn_like(x)).requires_grad_()
            y = norm(x, valid)[valid]
            (y * cotangent[VALID]).sum().backward()
            seen += [y.detach(), x.grad[valid]]
            assert not x.grad[~valid].any()
        return seen + [p.grad for p in norm.parameters()] + [b.clone() for b in norm.buffers()]

    for one, two in zip(run(1.0, 0), run(1e4, 4), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-11)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "index"), [v for v in VARIANTS if v[0] not in APPROXIMATE])
def test_gradient_is_exact(name, index, training):
    norm = make(name, index, training)
    x = inputs().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: norm(x, VALID)[VALID], (x, *norm.parameters()))


@pytest.mark.parametrize(("name", "index"), VARIANTS)
def test_positions_are_alone_in_eval(name, index):
    norm, x = make(name, index, training=False), inputs()
    whole = norm(x, VALID)
    for row, column in ((0, 6), (1, 3), (2, 0)):
        one = norm(x[row : row + 1, column : column + 1])
        torch.testing.assert_close(one[0, 0], whole[row, column], rtol=0, atol=1e-12)


def test_layer_rms_and_group_are_torch_s():
    x = inputs()
    flat = x.flatten(0, 1)
    pairs = [
        (part(Norm, {"part": "layer", "eps": 0.1}, width=WIDTH), nn.LayerNorm(WIDTH, 0.1)),
        (part(Norm, {"part": "rms", "eps": 0.1}, width=WIDTH), nn.RMSNorm(WIDTH, 0.1)),
        (part(Norm, {"part": "group", "groups": 3, "eps": 0.1}, width=WIDTH), nn.GroupNorm(3, WIDTH, 0.1)),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double()(x), theirs.double()(flat).view_as(x), rtol=0, atol=1e-12)
    by_hand = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()  # eps stands inside the root
    torch.testing.assert_close(pairs[1][0](x), by_hand, rtol=0, atol=1e-12)


def test_batch_is_torch_s_over_the_real_positions():
    ours = make("batch", 1, training=True)
    theirs = nn.BatchNorm1d(WIDTH, eps=ours.eps, momentum=ours.momentum).double()
    theirs.load_state_dict(
        {"weight": ours.weight, "bias": ours.bias, "running_mean": ours.mean, "running_var": ours.var}, strict=False
    )
    for step in range(3):
        x = inputs() + step
        torch.testing.assert_close(ours(x, VALID)[VALID], theirs(x[VALID]), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.mean, theirs.running_mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.var, theirs.running_var, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.eval()(x)[VALID], theirs.eval()(x[VALID]), rtol=0, atol=1e-12)


def test_power_follows_the_paper_after_the_warm_up():
    """The paper's Algorithm 2 by hand: what divides forward divides backward too, and nu follows the gradient."""
    norm = part(Norm, {"part": "power", "warmup": 0, "forward_decay": 0.8, "backward_decay": 0.6}, width=WIDTH).double()
    psi2, nu = torch.ones(WIDTH, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.float64)
    for step in range(4):
        x = inputs() * (step + 1)
        x = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).requires_grad_()  # a second time it does little
        scaled = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        cotangent = torch.randn_like(x)
        y = norm(x)
        z = (scaled / (psi2 + norm.eps).sqrt()).detach()
        torch.testing.assert_close(y, z, rtol=0, atol=1e-12)
        g = cotangent - nu * z
        want = torch.autograd.grad(scaled, x, g / (psi2 + norm.eps).sqrt())[0]
        torch.testing.assert_close(torch.autograd.grad(y, x, cotangent)[0], want, rtol=0, atol=1e-12)
        nu = nu * (1 - 0.4 * z.square().mean((0, 1))) + 0.4 * (cotangent * z).mean((0, 1))
        psi2 = 0.8 * psi2 + 0.2 * scaled.detach().square().mean((0, 1))
        torch.testing.assert_close(norm.along * 0.4, nu, rtol=0, atol=1e-12)
        torch.testing.assert_close(norm.square, psi2, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"part": "group", "groups": 5}, "not divisible into 5 groups"),
        ({"part": "group"}, "group needs 'groups'"),
        ({"part": "power", "groups": 7}, "not divisible into 7 groups"),
        ({"part": "power", "gradient": "exact"}, "must be 'paper' or 'authors'"),
        ("laier", "did you mean 'layer'"),
    ],
)
def test_bad_arguments(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        part(Norm, spec, width=WIDTH)
