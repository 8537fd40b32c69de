"""The Performer against its sums written out, against softmax, and in its draws."""

import pytest
import torch

import regard
from regard.bases.favor import Favor, orthogonal
from regard.core import Context, Mixer, UserError, part, state_bytes
from regard.core.stack import Stack

WIDTH, HEADS = 12, 3


def make(dtype=torch.float64, **arguments):
    torch.manual_seed(1)
    return part(Mixer, {"part": "performer", **arguments}, width=WIDTH, heads=HEADS).to(dtype)


def favor(dim=4, features=7, kind="softmax", eps=0.0, seed=3, redraw=0) -> Favor:
    return Favor(dim, features, kind, eps, seed, 0, redraw).double()


def inputs(time, dim=4):
    torch.manual_seed(time)
    return (torch.randn(2, HEADS, time, dim, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("kind", ["softmax", "relu"])
@pytest.mark.parametrize("causal", [False, True])
def test_formula(kind, causal):
    """All queries with all keys, without the stabilizer, which cancels."""
    ours, (q, k, v) = favor(kind=kind, eps=0.0 if kind == "softmax" else 0.01), inputs(13)

    def feature(x):
        x = x / 4**0.25
        inner = x @ ours.vectors.T
        return (inner - x.square().sum(-1, keepdim=True) / 2).exp() if kind == "softmax" else inner.relu() + 0.01

    weights = feature(q) @ feature(k).mT
    weights = weights.tril() if causal else weights
    want = weights / weights.sum(-1, keepdim=True) @ v
    y = ours.recall(q, k, v, ours.start(q[:, :, 0, 0]))[0] if causal else ours.everything(q, k, v)
    assert torch.allclose(y, want, rtol=0, atol=1e-10)


def test_it_is_softmax_attention_on_average():
    q, k, v = (t / 2 for t in inputs(13))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    errors = []
    for features in (16, 256, 4096):
        ours = favor(features=features)
        errors.append(float((ours.recall(q, k, v, ours.start(q[:, :, 0, 0]))[0] - want).square().mean().sqrt()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.01


def test_the_draw():
    drawn = orthogonal(70, 16, (1, 0, 0))
    blocks = [block / block.norm(dim=1, keepdim=True) for block in drawn.split(16)]
    assert all(torch.allclose(b @ b.T, torch.eye(len(b)), atol=1e-5) for b in blocks)
    lengths = orthogonal(4000, 16, (1, 0, 0)).square().sum(1)
    assert abs(float(lengths.mean()) - 16) < 0.5  # as long as Gaussian vectors, and as different
    assert abs(float(lengths.var()) - 32) < 4
    assert torch.equal(drawn, orthogonal(70, 16, (1, 0, 0)))
    others = [orthogonal(70, 16, seed) for seed in ((2, 0, 0), (1, 1, 0), (1, 0, 1))]
    assert not any(torch.equal(drawn, other) for other in others)


def test_every_layer_has_a_draw_of_its_own():
    model = regard.build("performer", size="tiny", vocab=11)
    first, second = (layer.branches["mixer"].favor.vectors for layer in model.stack.layers[:2])
    assert not torch.equal(first, second)


def test_redraw(tmp_path):
    """At every third call in training, never in evaluation; and a saved model goes on as it would have."""
    overrides = ["model.layer.0.mixer.redraw=3", "model.dropout=0"]
    model = regard.build("performer", size="tiny", vocab=11, overrides=overrides)
    tokens = torch.randint(11, (2, 5))

    def draws(model, count):
        seen = []
        for _ in range(count):
            model(tokens)
            seen.append(model.stack.layers[1].branches["mixer"].favor.vectors.clone())
        return seen

    seen = draws(model, 5)
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[2], seen[3])
    regard.save(model, tmp_path / "model")
    again = regard.restore(tmp_path / "model").train()
    for ours, others in zip(draws(model, 3), draws(again, 3), strict=True):
        assert torch.equal(ours, others)
    last = draws(model, 1)[0]
    assert all(torch.equal(last, one) for one in draws(model.eval(), 7))


def test_redraw_and_recomputed_layers():
    """A layer that is computed again in the backward pass sees what it saw the first time."""
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        stack = Stack(WIDTH, 2, {"mixer": {"part": "performer", "redraw": 1}}, heads=HEADS).double()
        stack.gradient_checkpointing = recompute
        for _ in range(3):
            stack.zero_grad()
            x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
            stack(x, Context.begin(2, 5)).square().sum().backward()
        gradients.append([p.grad.clone() for p in stack.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", ["softmax", "relu"])
def test_large_inputs_and_empty_rows(dtype, causal, feature):
    mixer = make(dtype, causal=causal, feature=feature)
    x = (30 * torch.randn(3, 21, WIDTH)).to(dtype).requires_grad_()
    valid = torch.arange(21)[None] < torch.tensor([21, 0, 5])[:, None]
    y = mixer(x, Context.begin(3, 21, valid=valid))
    y[valid].float().sum().backward()
    assert y.dtype == dtype
    assert bool(torch.isfinite(y).all())
    assert all(bool(torch.isfinite(t.grad).all()) for t in (x, *mixer.parameters()))


@torch.no_grad()
def test_the_future_has_no_part_in_the_stabiliser():
    """A key so large that it would make all earlier ones vanish, in single precision."""
    mixer = make(torch.float32)
    x = torch.randn(2, 37, WIDTH)
    before = mixer(x, Context.begin(2, 37))
    x[:, 30:] *= 300
    assert torch.allclose(mixer(x, Context.begin(2, 37))[:, :30], before[:, :30], rtol=0, atol=1e-5)


@pytest.mark.parametrize("feature", ["softmax", "relu"])
@torch.no_grad()
def test_the_state_does_not_grow(feature):
    model = regard.build("performer", size="tiny", vocab=11, overrides=[f"model.layer.0.mixer.feature={feature}"])
    state, sizes = model.eval().start(3, 300), []
    for count in (1, 70, 9):
        _, state = model.step(torch.randint(11, (3, count)), state)
        sizes.append(state_bytes(state.layers))
    assert sizes == [3 * model.cost(1).state] * 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"feature": "softmux"}, "softmax"),
        ({"features": 0}, "at least 1"),
        ({"redraw": -1}, "at least 0"),
        ({"eps": -1.0}, "eps"),
        ({"position": "alibi"}, "queries and keys"),
    ],
)
def test_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        make(**arguments)


def test_to_both_sides_it_does_not_step():
    mixer = make(causal=False)
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64)
    with pytest.raises(UserError, match="whole sequence"):
        mixer.step(x, mixer.start(Context.begin(1, 0), 3), Context.begin(1, 3))
