"""Where numbers go wrong, over every mixer and feed-forward found: half precision, rows of nothing but padding, lengths
that no block divides."""

import pytest
import torch

from regard.core import Context, Memory, Mixer, Place, part
from regard.schema import find, names

VARIANTS = [(name, index) for name in names(Mixer) for index in range(len(find(Mixer, name).examples))]


def make(name: str, index: int) -> Mixer:
    torch.manual_seed(index)
    spec = {"part": name, **find(Mixer, name).examples[index]}
    return part(Mixer, spec, width=24, heads=3, depth=2, place=Place(encoder=1, decoder=2, memory=24)).eval()


def memory_for(batch: int, dtype: torch.dtype) -> Memory:
    x = torch.randn(batch, 7, 24).to(dtype)
    return Memory(x, torch.arange(7)[None] < torch.tensor([7, 4, 1][:batch])[:, None], layer_outputs=(x,))


def run(mixer: Mixer, x: torch.Tensor, valid: torch.Tensor | None, memory: Memory) -> torch.Tensor:
    return mixer(x, Context.begin(*x.shape[:2], valid=valid, memory=memory))


@pytest.mark.parametrize(("name", "index"), VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision(name, index, dtype):
    """Weights and inputs of half precision give about what full ones give, and gradients that are finite."""
    mixer = make(name, index)
    torch.manual_seed(9)
    x = torch.randn(2, 11, mixer.width)
    torch.manual_seed(10)
    full = run(mixer, x, None, memory_for(2, torch.float32))
    mixer, x = mixer.to(dtype), x.to(dtype).requires_grad_()
    torch.manual_seed(10)
    half = run(mixer, x, None, memory_for(2, dtype))
    assert half.dtype == dtype
    scale = full.detach().abs().mean() + 1e-3
    assert float((half.float() - full).detach().abs().mean()) < 0.2 * float(scale)
    half.float().square().sum().backward()
    assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize(("name", "index"), VARIANTS)
def test_nothing_but_padding(name, index):
    """A row of only padding gives finite outputs and gradients, and does not affect other rows."""
    mixer = make(name, index).double()
    torch.manual_seed(9)
    x = torch.randn(3, 6, mixer.width, dtype=torch.float64, requires_grad=True)
    valid = torch.arange(6)[None] < torch.tensor([6, 0, 3])[:, None]
    memory = memory_for(3, torch.float64)
    y = run(mixer, x, valid, memory)
    assert bool(torch.isfinite(y).all())
    (y * valid[..., None]).sum().backward()
    assert bool(torch.isfinite(x.grad).all())
    assert not bool(x.grad[1].any())
    if mixer.streams:
        state = mixer.start(Context.begin(3, 0, memory=memory), 6)
        for begin in range(0, 6, 2):
            some = valid[:, begin : begin + 2]
            lengths = valid[:, :begin].sum(1)
            out, state = mixer.step(x[:, begin : begin + 2].detach(), state, Context.after(lengths, 2, valid=some))
            assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize(("name", "index"), VARIANTS)
@pytest.mark.parametrize("length", [2, 67])
def test_odd_lengths(name, index, length):
    mixer = make(name, index)
    length = min(length, mixer.limit or length)
    x = torch.randn(1, length, mixer.width, requires_grad=True)
    y = run(mixer, x, None, memory_for(1, torch.float32))
    y.square().sum().backward()
    assert y.shape == (1, length, mixer.out_width)
    assert bool(torch.isfinite(y).all() and torch.isfinite(x.grad).all())
