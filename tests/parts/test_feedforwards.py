"""Feed-forwards against their formulas written out."""

import pickle

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.core import Context, Mixer, UserError, losses, part
from regard.ops.activation import ACTIVATIONS

WIDTH = 12
LENGTHS = torch.tensor([7, 1, 4])
VALID = torch.arange(7)[None] < LENGTHS[:, None]


def make(spec):
    torch.manual_seed(3)
    return part(Mixer, spec, width=WIDTH).double()


def inputs(valid=None):
    torch.manual_seed(5)
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    return x, Context.begin(3, 7, valid=valid)


@pytest.mark.parametrize(
    ("name", "bend"),
    [("silu", F.silu), ("gelu", F.gelu), ("relu", F.relu), ("sigmoid", torch.sigmoid), ("identity", lambda x: x)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_glu(name, bend, bias):
    glu = make({"part": "glu", "activation": name, "hidden": 10, "bias": bias, "norm": "layer"})
    x, context = inputs()

    def shift(linear):
        return linear.bias if bias else 0.0

    gate = x @ glu.gate.weight.T + shift(glu.gate)
    inner = bend(gate) * (x @ glu.into.weight.T + shift(glu.into))
    want = F.layer_norm(inner, (10,)) @ glu.out.weight.T + shift(glu.out)
    assert torch.allclose(glu(x, context), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_pickles(name):
    x, context = inputs()
    mlp = make({"part": "mlp", "activation": name})
    again = pickle.loads(pickle.dumps(mlp))
    assert torch.equal(again(x, context), mlp(x, context))


def test_glu_has_the_parameters_of_an_mlp():
    count = [sum(p.numel() for p in make({"part": name, "bias": False}).parameters()) for name in ("glu", "mlp")]
    assert count[0] == count[1]


EXPERTS = [
    {"experts": 5, "top": 2, "balance": 0.3, "z": 0.07},
    {"experts": 4, "top": 1, "weigh": "all", "balance": 0.5},
    {"experts": 3, "top": 3, "weigh": "all", "balance": 0.0, "z": 0.2, "expert": "glu"},
    {"experts": 6, "top": 4, "expert": {"part": "mlp", "hidden": 5, "activation": "gelu", "norm": "layer"}},
]


def ask_one_by_one(moe, x, valid):
    """The mixture computed position by position: outputs, balance loss and z loss."""
    n, context = len(moe.experts), Context.begin(1, 1)
    y, shares, chances, sizes = torch.zeros_like(x), [0.0] * n, [0.0] * n, []
    for row, column in valid.nonzero().tolist():
        one = x[row, column]
        scores = moe.router.weight @ one
        everyone = scores.softmax(0)
        chosen = sorted(range(n), key=lambda i: -scores[i].item())[: moe.top]
        total = sum(everyone[i] for i in chosen) if moe.weigh == "chosen" else 1.0
        told = sum(everyone[i] / total * moe.experts[i](one[None, None], context)[0, 0] for i in chosen)
        y = y.index_put((torch.tensor(row), torch.tensor(column)), told)
        for i in range(n):
            shares[i] += (i in chosen) / moe.top
            chances[i] = chances[i] + everyone[i]
        sizes.append(scores.logsumexp(0).square())
    count = len(sizes)
    even = n * sum(share / count * chance / count for share, chance in zip(shares, chances, strict=True))
    return y, moe.balance * even + moe.z * sum(sizes) / count


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("spec", EXPERTS, ids=str)
def test_experts_against_a_loop(spec, ragged):
    moe = make({"part": "experts", **spec})
    x, context = inputs(VALID if ragged else None)
    valid = VALID if ragged else torch.ones_like(VALID)
    with losses(moe) as more:
        y = moe(x, context)
    want, loss = ask_one_by_one(moe, x, valid)
    assert torch.allclose(y[valid], want[valid], rtol=0, atol=1e-12)
    assert torch.allclose(more(), loss, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(y)[valid]
    wanted = [x, *moe.parameters()]
    ours, theirs = (
        torch.autograd.grad((out[valid] * cotangent).sum() + extra, wanted, allow_unused=True, retain_graph=True)
        for out, extra in ((y, more()), (want, loss))
    )
    for one, two in zip(ours, theirs, strict=True):
        one, two = (torch.zeros(1, dtype=torch.float64) if g is None else g for g in (one, two))
        assert torch.allclose(one, two.expand_as(one), rtol=0, atol=1e-10)
    assert float(ours[1].abs().max()) > 1e-3  # the router learns


def test_experts_used_alike_cost_one():
    """A router with equal logits has a balance loss equal to its coefficient."""
    moe = make({"part": "experts", "experts": 4, "balance": 0.25})
    torch.nn.init.zeros_(moe.router.weight)
    x, context = inputs()
    with losses(moe) as more:
        moe(x, context)
    assert more().item() == pytest.approx(0.25)


@pytest.mark.parametrize("weigh", ["chosen", "all"])
def test_experts_in_mixed_precision(weigh):
    moe = make({"part": "experts", "experts": 4, "weigh": weigh}).float()
    x, context = inputs(VALID)
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(x.float(), context)
    assert torch.allclose(y[VALID].float(), moe(x.float(), context)[VALID], rtol=0.05, atol=0.05)


def test_experts_with_nothing_real():
    moe = make({"part": "experts", "experts": 4})
    x, _ = inputs()
    with losses(moe) as more:
        y = moe(x, Context.begin(3, 7, valid=torch.zeros_like(VALID)))
    assert float(y.detach().abs().max()) == 0
    assert more().item() == 0


def test_losses_of_a_model():
    """Losses of all layers are collected, for shared layers once per run; none outside the `with`, and none without
    experts."""
    tokens = torch.randint(31, (2, 9))

    def build(**more):
        layer = {"mixer": "attention", "feedforward": {"part": "experts", "experts": 3, "balance": 1.0}}
        model = {"kind": "decoder", "width": WIDTH, "heads": 3, "depth": 3, "layer": [layer], **more}
        torch.manual_seed(1)
        return regard.build({"model": model}, vocab=31)

    for share in ("none", "layers"):
        model = build(share=share)
        with losses(model) as more:
            model(tokens)
        total = more()
        assert 3 * 0.8 < total.item() < 3 * 2
        total.backward()
        assert all(float(layer.branches.feedforward.router.weight.grad.abs().max()) > 0 for layer in model.stack.layers)
        model(tokens)
        assert more() is not total
        assert torch.equal(more(), total)
    plain = build(layer=[{"mixer": "attention"}])
    with losses(plain) as more:
        plain(tokens)
    assert more() == 0.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"top": 9}, "between 1 and the number of experts, 8"),
        ({"top": 1}, "learns nothing"),
        ({"weigh": "some"}, "weigh must be"),
        ({"expert": {"part": "attention", "heads": 3}}, "must be a pointwise feed-forward"),
        ({"expert": {"part": "conv_mlp", "size": 3}}, "must be a pointwise feed-forward"),
        ({"expert": {"part": "mlp", "hiden": 3}}, "expert: mlp has no 'hiden'; did you mean 'hidden'?"),
    ],
)
def test_bad_experts(spec, message):
    with pytest.raises(UserError) as error:
        part(Mixer, {"part": "experts", **spec}, width=WIDTH, heads=3)
    assert message in str(error.value)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_conv_mlp_of_size_one_is_mlp(causal, activation):
    mlp = make({"part": "mlp", "activation": activation, "hidden": 10})
    conv = make({"part": "conv_mlp", "activation": activation, "hidden": 10, "causal": causal})
    for name in ("into", "out"):
        getattr(conv, name).weight.data = getattr(mlp, name).weight.data[..., None].clone()
        getattr(conv, name).bias.data = getattr(mlp, name).bias.data.clone()
    x, context = inputs(VALID)
    one, two = conv(x, context), mlp(x, context)
    assert torch.allclose(one, two, rtol=0, atol=1e-12)
    for y in (one, two):
        y[VALID].square().sum().backward()
    assert torch.allclose(conv.into.weight.grad[..., 0], mlp.into.weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_conv_mlp_sums_over_neighbours(causal):
    """Written out with shifts: weight j meets the input of j places from the window's left end."""
    conv = make({"part": "conv_mlp", "size": 3, "second": 5, "hidden": 7, "causal": causal})
    x, context = inputs()

    def convolve(layer, x):
        size = layer.kernel_size[0]
        left = size - 1 if causal else size // 2
        padded = F.pad(x, (0, 0, left, size - 1 - left))
        return sum(padded[:, j : j + x.shape[1]] @ layer.weight[..., j].T for j in range(size)) + layer.bias

    want = convolve(conv.out, F.relu(convolve(conv.into, x)))
    assert torch.allclose(conv(x, context), want, rtol=0, atol=1e-12)


def test_bad_conv_mlp():
    with pytest.raises(UserError, match="must be odd"):
        make({"part": "conv_mlp", "size": 4, "causal": False})
    with pytest.raises(UserError, match="at least 1"):
        make({"part": "conv_mlp", "size": 0})
