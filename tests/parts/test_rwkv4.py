"""RWKV-4 against its formula, and with exponents that would overflow."""

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.core import Context, Mixer, part, select, state_bytes
from regard.parts.mixers.rwkv4 import Rwkv4

WIDTH = 6


def make(dtype=torch.float64, **arguments) -> Rwkv4:
    torch.manual_seed(1)
    return part(Mixer, {"part": "rwkv4", **arguments}, width=WIDTH).to(dtype)


def test_formula():
    """The sums written out, all positions with all others."""
    mixer, time = make(hidden=5), 13
    x = torch.randn(2, time, WIDTH, dtype=torch.float64)
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]

    def mapped(letter):
        mix = getattr(mixer, f"mix_{letter}")
        return getattr(mixer, letter)(mix * x + (1 - mix) * before)

    r, k, v = (mapped(letter) for letter in "rkv")
    age = torch.arange(time)[:, None] - torch.arange(time)  # (time, time)
    log = k[:, None] - (age[..., None] - 1) * mixer.decay.exp()  # (batch, t, s, hidden)
    log = torch.where((age > 0)[..., None], log, float("-inf"))
    log = torch.where((age == 0)[..., None], k[:, None] + mixer.bonus, log)
    want = mixer.out(r.sigmoid() * (log.softmax(2) * v[:, None]).sum(2))
    assert torch.allclose(mixer(x, Context.begin(2, time)), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 3e3])
def test_no_key_is_too_large(dtype, size):
    """Extreme keys and decays, and rows of only padding: outputs and gradients are finite."""
    mixer = make(dtype)
    with torch.no_grad():
        mixer.k.weight.mul_(size)
        mixer.decay.copy_(torch.linspace(-30, 9, WIDTH))
    x = torch.randn(3, 37, WIDTH).to(dtype).requires_grad_()
    valid = torch.arange(37)[None] < torch.tensor([37, 0, 5])[:, None]
    y = mixer(x, Context.begin(3, 37, valid=valid))
    y[valid].float().sum().backward()
    assert y.dtype == dtype
    assert bool(torch.isfinite(y).all())
    assert all(bool(torch.isfinite(t.grad).all()) for t in (x, *mixer.parameters()))


def test_a_large_key_of_the_past_is_forgotten():
    """A key that outweighs all others by e^2000 has faded after enough steps; what follows must still be seen."""
    mixer = make(torch.float32)
    with torch.no_grad():
        mixer.decay.fill_(torch.tensor(50.0).log())
        mixer.k.weight.copy_(torch.eye(WIDTH))
        mixer.mix_k.fill_(1.0)
    x = torch.randn(1, 101, WIDTH)
    x[:, 0] = 2000.0
    y = mixer(x, Context.begin(1, 101))
    alone = mixer(x[:, 60:], Context.begin(1, 41))
    assert torch.allclose(y[:, 62:], alone[:, 2:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_hundred_thousand_steps():
    mixer, time = make(torch.float32), 100_000
    mixer.decay.copy_(torch.linspace(-12, 6, WIDTH))
    x = torch.randn(1, time, WIDTH)
    y, state = mixer.step(x, mixer.start(Context.begin(1, 0), time), Context.begin(1, time))
    assert bool(torch.isfinite(y).all())
    assert all(bool(torch.isfinite(t).all()) for t in state)
    after, state = mixer.step(x[:, :7], state, Context.after(torch.tensor([time]), 7))
    double = make(torch.float64)
    double.load_state_dict(mixer.state_dict())
    twice = double(torch.cat((x, x[:, :7]), 1).double(), Context.begin(1, time + 7))
    assert torch.allclose(twice[:, time:], after.double(), rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_state_does_not_grow():
    model = regard.build("rwkv4", size="tiny", vocab=11).eval()
    state, sizes = model.start(3, 200), []
    for _ in range(3):
        _, state = model.step(torch.randint(11, (3, 50)), state)
        sizes.append(state_bytes(state.layers))
    assert sizes == [3 * model.cost(1).state] * 3
    assert state_bytes(select(state.layers, torch.tensor([1]))) == model.cost(1).state
