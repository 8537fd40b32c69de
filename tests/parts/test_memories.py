"""Mixers whose memory is a matrix: against their equations, written out position by position, and what they promise."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Context, Mixer, UserError, part, state_bytes
from regard.core.mixer import map_tensors
from regard.parts.mixers.delta import Delta
from regard.parts.mixers.gated_linear import GatedLinear
from regard.parts.mixers.linear import Linear
from regard.parts.mixers.retention import Retention
from regard.parts.mixers.rwkv6 import Rwkv6

WIDTH, HEADS, TIME = 24, 3, 13
SHORT = {"part": "convolution", "kind": "depthwise", "size": 4, "into": "none", "out": False}
MIXERS = {
    "linear": {},
    "linear to both sides": {"part": "linear", "causal": False},
    "retention": {},
    "gated_linear": {},
    "delta": {"near": SHORT},
    "rwkv6": {},
}


def make(name: str) -> Mixer:
    torch.manual_seed(0)
    return part(Mixer, {"part": name} | MIXERS[name], width=WIDTH, heads=HEADS)


def disturb(mixer: Mixer) -> Mixer:
    """Randomize all weights, so that ignoring one of them is noticed."""
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return mixer.double()


def split(x: Tensor) -> Tensor:
    """(time, heads * dim) -> (time, heads, dim)"""
    return x.unflatten(-1, (HEADS, -1))


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(1, TIME, WIDTH, dtype=torch.float64)


def same(mixer: Mixer, x: Tensor, want: Tensor) -> None:
    y = mixer(x, Context.begin(1, x.shape[1]))[0]
    torch.testing.assert_close(y, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("feature", ["elu", "relu"])
@pytest.mark.parametrize("causal", [True, False])
def test_linear(causal, feature):
    """Linear attention as attention with weights f(q) f(k), normalized."""
    torch.manual_seed(0)
    mixer = disturb(Linear(WIDTH, HEADS, dim=5, value_dim=7, causal=causal, feature=feature))
    x = inputs()
    q, k, v = (split(to(x[0])).transpose(0, 1) for to in (mixer.q, mixer.k, mixer.v))  # (heads, time, dim)
    q, k = (F.elu(t) + 1 if feature == "elu" else t.relu() for t in (q, k))
    weights = (q @ k.mT).tril() if causal else q @ k.mT
    y = weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)
    same(mixer, x, mixer.out(y.transpose(0, 1).flatten(-2)))


def test_retention():
    """The paper's parallel form, with both of its normalizations."""
    torch.manual_seed(0)
    mixer = disturb(Retention(WIDTH, HEADS, dim=6, value_dim=7, position="none", head_norm="layer"))
    x = inputs()
    q, k, v = (split(to(x[0])).transpose(0, 1) for to in (mixer.q, mixer.k, mixer.v))
    age = torch.arange(TIME)[:, None] - torch.arange(TIME)
    kept = 1 - 2.0 ** -(5 + torch.arange(HEADS, dtype=torch.float64))
    fades = (kept[:, None, None] ** age.clamp(min=0)).tril()  # (heads, time, time)
    weights = q @ k.mT * 6**-0.5 * fades / fades.sum(-1, keepdim=True).sqrt()
    weights = weights / weights.sum(-1, keepdim=True).abs().clamp(min=1)
    y = mixer.head_norm((weights @ v).transpose(0, 1)).flatten(-2)
    same(mixer, x, mixer.out(F.silu(mixer.gate(x[0])) * y))


def test_retention_knows_only_distances():
    """With rotary positions, and but for the norm's epsilon, a sequence that begins later is the same."""
    torch.manual_seed(0)
    mixer = Retention(WIDTH, HEADS, head_norm={"part": "rms", "eps": 1e-30}).double()
    x = inputs()
    at_once = mixer(x, Context.begin(1, TIME))
    later, _ = mixer.step(x, mixer.start(Context.begin(1, 0), 0), Context.after(torch.tensor([1000]), TIME))
    torch.testing.assert_close(later, at_once, rtol=0, atol=1e-9)


def test_gated_linear():
    torch.manual_seed(0)
    mixer = disturb(GatedLinear(WIDTH, HEADS, dim=5, value_dim=7, rank=2, temperature=0.7))
    x = inputs()
    q, k, v, gate = (split(to(x[0])) for to in (mixer.q, mixer.k, mixer.v, mixer.gate))
    kept = split(torch.sigmoid(mixer.fade(mixer.narrow(x[0])))) ** (1 / 0.7)
    state, outputs = torch.zeros(HEADS, 5, 7, dtype=torch.float64), []
    for t in range(TIME):
        state = kept[t, :, :, None] * state + k[t, :, :, None] * v[t, :, None]
        y = (q[t, :, None] @ state)[:, 0] * 5**-0.5
        outputs.append(mixer.out((F.silu(gate[t]) * mixer.head_norm(y)).flatten()))
    same(mixer, x, torch.stack(outputs))


@pytest.mark.parametrize("near", [None, SHORT])
def test_delta(near):
    torch.manual_seed(0)
    mixer = disturb(Delta(WIDTH, HEADS, dim=5, value_dim=7, near=near))
    x = inputs()
    every = mixer.into(x[0])
    if near is not None:
        kernel = mixer.near.kernel.weight[:, 0]  # (channels, size)
        reach = F.pad(every, (0, 0, 3, 0))
        every = torch.stack([(reach[t : t + 4] * kernel.T).sum(0) for t in range(TIME)])
    q, k, v = (split(t) for t in F.silu(every).split((15, 15, 21), -1))
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    beta = torch.sigmoid(mixer.beta(x[0]))
    state, outputs = torch.zeros(HEADS, 5, 7, dtype=torch.float64), []
    for t in range(TIME):
        forget = torch.eye(5) - beta[t, :, None, None] * k[t, :, :, None] * k[t, :, None]
        state = forget @ state + beta[t, :, None, None] * k[t, :, :, None] * v[t, :, None]
        outputs.append(mixer.out(mixer.head_norm((q[t, :, None] @ state)[:, 0]).flatten()))
    same(mixer, x, torch.stack(outputs))


def test_rwkv6():
    torch.manual_seed(0)
    mixer = disturb(Rwkv6(WIDTH, HEADS, rank=2, decay_rank=4))
    x = inputs()
    state, last, outputs = torch.zeros(HEADS, 8, 8, dtype=torch.float64), torch.zeros_like(x[0, 0]), []
    for now in x[0]:
        back = last - now
        low = torch.tanh(mixer.mix_in(now + back * mixer.mix_first)).view(5, 2)
        mixed = [now + back * (mixer.mix[i] + low[i] @ mixer.mix_out[i]) for i in range(5)]
        w = mixer.decay + mixer.decay_out(torch.tanh(mixer.decay_in(mixed[0])))
        kept = torch.exp(-torch.exp(w)).view(HEADS, 8, 1)
        k, v, r = (to(t).view(HEADS, 8) for to, t in zip((mixer.k, mixer.v, mixer.r), mixed[1:4], strict=True))
        gain = k[:, :, None] * v[:, None]
        y = (r[:, None] @ (state + mixer.bonus[:, :, None] * gain)).flatten()
        y = F.group_norm(y[None], HEADS, mixer.norm.inner.weight, mixer.norm.inner.bias, 64e-5)[0]
        outputs.append(mixer.out(y * F.silu(mixer.gate(mixed[4]))))
        state, last = kept * state + gain, now
    same(mixer, x, torch.stack(outputs))


@pytest.mark.parametrize("name", MIXERS)
def test_rows_without_anything(name):
    """Rows of padding are finite, have no gradient and leave the state unchanged."""
    mixer = make(name)
    x = torch.randn(2, TIME, WIDTH, requires_grad=True)
    valid = torch.arange(TIME) < torch.tensor([[4], [0]])
    y = mixer(x, Context.begin(2, TIME, valid=valid))
    y[valid].sum().backward()
    assert bool(torch.isfinite(y).all())
    assert bool(torch.isfinite(x.grad).all())
    assert not x.grad[1].any()
    if mixer.streams:
        start = mixer.start(Context.begin(2, 0), 0)
        _, state = mixer.step(x, start, Context.begin(2, TIME, valid=valid))
        for ours, was in zip(each_row(state, 1), each_row(start, 1), strict=True):
            assert torch.equal(ours, was)


def each_row(state, row: int) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(state, lambda t: found.append(t[row]) or t)
    return found


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("how", [torch.bfloat16, torch.float16, "autocast"])
def test_half_precision(name, how):
    """Near what single precision gives, and so are many small steps: the memory itself is kept in single precision."""
    mixer, x = make(name), inputs().float()
    want = mixer(x, Context.begin(1, TIME))
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            y = mixer(x, Context.begin(1, TIME))
            y.float().square().sum().backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in mixer.parameters())
    else:
        mixer, x = mixer.to(how), x.to(how)
        y = mixer(x, Context.begin(1, TIME))
        assert y.dtype == how
    y, want = y.detach().float(), want.detach()
    assert float((y - want).norm()) < 0.03 * float(want.norm())
    if mixer.streams and how != "autocast":
        state, steps = mixer.start(Context.begin(1, 0), 0), []
        for t in range(TIME):
            one, state = mixer.step(x[:, t : t + 1], state, Context.after(torch.tensor([t]), 1))
            steps.append(one)
        assert state.matrix.dtype == torch.float32
        assert float((torch.cat(steps, 1).detach().float() - y).norm()) < 0.02 * float(want.norm())
        assert state_bytes(state) == mixer.cost(1, TIME).state


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "linear to both sides"])
def test_state_and_step_do_not_grow(name):
    mixer = make(name)
    costs = {mixer.cost(1, past) for past in (0, 100, 100_000)}
    assert len(costs) == 1
    assert mixer.cost(1 << 16).flops < 4.01 * mixer.cost(1 << 14).flops


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "linear to both sides"])
def test_long_sequences(name):
    """Far positions are finite and the gradient of the first one too."""
    mixer = make(name)
    torch.manual_seed(2)
    x = torch.randn(1, 3001, WIDTH, requires_grad=True)
    y = mixer(x, Context.begin(1, 3001))
    y[:, -3:].square().sum().backward()
    assert bool(torch.isfinite(y).all())
    assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"part": "linear", "feature": "elo"}, "did you mean 'elu'"),
        ({"part": "linear", "width": 25}, "width 25 is not divisible by 3 heads"),
        ({"part": "retention", "position": "alibi"}, "rotates queries and keys, not 'alibi'"),
        ({"part": "retention", "position": "sinusoidal"}, "rotates queries and keys, not 'sinusoidal'"),
        ({"part": "gated_linear", "temperature": 0.0}, "temperature above 0"),
        ({"part": "delta", "near": {**SHORT, "causal": False}}, "near must be a mixer that streams"),
        ({"part": "delta", "near": {"part": "lstm", "hidden": 7}}, "near must be a mixer that streams"),
        ({"part": "rwkv6", "rank": 0}, "at least 1"),
    ],
)
def test_bad_arguments(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        part(Mixer, spec, **({} if "width" in spec else {"width": WIDTH}), heads=HEADS)


def test_what_looks_ahead_does_not_step():
    mixer = make("linear to both sides")
    x = torch.randn(1, 3, WIDTH)
    with pytest.raises(UserError, match="does not step"):
        mixer.step(x, mixer.start(Context.begin(1, 0), 0), Context.begin(1, 3))
