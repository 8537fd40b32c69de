"""Chunked memories against a plain loop over positions: outputs, last states and gradients, for every kind of decay,
any chunk and any cut."""

import pytest
import torch
from torch import Tensor

from regard.ops import delta as delta_rule
from regard.ops.delta import delta
from regard.ops.fading import flops, gated_linear_attention, with_ones
from regard.verify.laws import count_flops

BATCH, HEADS, KEY, VALUE = 2, 3, 5, 7
DECAYS = {
    "none": None,
    "head": (HEADS, 1, 1),
    "time": (BATCH, HEADS, 0, 1),
    "channel": (BATCH, HEADS, 0, KEY),
    "fixed channel": (HEADS, 1, KEY),
}
LENGTHS = (1, 2, 13, 64, 65, 150)
TINY = 1e-10


def draw(time: int, kind: str, bonus: bool = False, strength: float = 1.0) -> dict[str, Tensor | None]:
    torch.manual_seed(time)
    made = {
        "q": torch.randn(BATCH, HEADS, time, KEY),
        "k": torch.randn(BATCH, HEADS, time, KEY),
        "v": torch.randn(BATCH, HEADS, time, VALUE),
        "state": torch.randn(BATCH, HEADS, KEY, VALUE),
        "bonus": torch.randn(HEADS, KEY) if bonus else None,
    }
    if kind == "delta":
        made = {n: t for n, t in made.items() if n != "bonus"} | {"beta": torch.rand(BATCH, HEADS, time) * 2}
        made["k"] = torch.nn.functional.normalize(made["k"], dim=-1)
    else:
        shape = DECAYS[kind]
        made["decay"] = None if shape is None else -strength * torch.rand([n or time for n in shape])
    return {n: None if t is None else t.double().requires_grad_() for n, t in made.items()}


def loop(q, k, v, decay=None, state=None, valid=None, bonus=None):
    """The definition, position by position."""
    outputs, time = [], q.shape[2]
    decay = torch.zeros(1, dtype=q.dtype) if decay is None else decay
    decay = decay.view(*[1] * (4 - decay.dim()), *decay.shape).expand(-1, -1, time, -1)
    for t in range(time):
        gain = k[:, :, t, :, None] * v[:, :, t, None, :]
        after = state * decay[:, :, t].exp()[..., None] + gain
        seen = after if bonus is None else state + bonus[:, :, None] * gain
        outputs.append((q[:, :, t, None] @ seen)[:, :, 0])
        state = after if valid is None else torch.where(valid[:, t, None, None, None], after, state)
    return torch.stack(outputs, 2), state


def loop_delta(q, k, v, beta, state, valid=None):
    outputs = []
    for t in range(q.shape[2]):
        key = k[:, :, t, :, None]
        after = state + beta[:, :, t, None, None] * key * (v[:, :, t, None] - key.mT @ state)
        outputs.append((q[:, :, t, None] @ after)[:, :, 0])
        state = after if valid is None else torch.where(valid[:, t, None, None, None], after, state)
    return torch.stack(outputs, 2), state


def run(kernel, given, **more):
    """Output and last state, and the gradients of all that was given, with some fixed cotangents."""
    y, state = kernel(**given, **more)
    torch.manual_seed(1)
    loss = sum((t * torch.randn(t.shape, dtype=torch.float64).to(t)).sum() for t in (y, state))
    leaves = [t for t in given.values() if t is not None]
    return [y, state, *torch.autograd.grad(loss, leaves)]


def same(ours, want, limit=TINY):
    for one, two in zip(ours, want, strict=True):
        assert one.shape == two.shape
        assert float(((one - two).abs() / two.abs().clamp(min=1)).detach().max()) < limit


@pytest.mark.pairwise
@pytest.mark.parametrize("time", LENGTHS)
@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("kind", DECAYS)
def test_loop(kind, bonus, time):
    given = draw(time, kind, bonus)
    want = run(loop, given)
    for chunk in (64, 8, 1) if time < 65 else (64,):
        same(run(gated_linear_attention, given, chunk=chunk), want)


@pytest.mark.parametrize("time", LENGTHS)
def test_delta_loop(time):
    given = draw(time, "delta")
    want = run(loop_delta, given)
    for chunk in (64, 8, 1) if time < 65 else (64,):
        same(run(delta, given, chunk=chunk), want)


@pytest.mark.parametrize("kind", [*DECAYS, "delta"])
def test_columns_that_are_not_real(kind):
    """They neither write nor fade, whatever stands in them."""
    given = draw(13, kind)
    valid = torch.arange(13) < torch.tensor([[6], [0]])
    kernel, plain = (delta, loop_delta) if kind == "delta" else (gated_linear_attention, loop)
    (y, state), (want, last) = kernel(**given, valid=valid), plain(**given, valid=valid)
    same([y[0, :, :6], state], [want[0, :, :6], last])
    assert torch.equal(state[1], given["state"][1])
    assert bool(torch.isfinite(y).all())


@pytest.mark.parametrize("kind", [*DECAYS, "delta"])
def test_cuts(kind):
    """The state carries over from one call to the next."""
    given = draw(150, kind)
    kernel = delta if kind == "delta" else gated_linear_attention
    want, last = kernel(**given)
    state, outputs = given.pop("state"), []
    for begin, end in ((0, 1), (1, 70), (70, 83), (83, 150)):
        here = {
            n: t[:, :, begin:end] if t is not None and t.dim() > 2 and t.shape[2] == 150 else t
            for n, t in given.items()
        }
        y, state = kernel(**here, state=state)
        outputs.append(y)
    same([torch.cat(outputs, 2), state], [want, last])


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("strength", [0.0, 1e-6, 30.0, 1e4])
def test_weak_and_strong_decays(kind, strength):
    """Where nearly nothing is kept, single precision gives what double does: no difference of large sums, no NaN."""
    given = draw(150, kind, strength=strength)
    if given["decay"] is not None:
        with torch.no_grad():
            given["decay"] *= torch.rand_like(given["decay"]) < 0.2
    want = run(gated_linear_attention, given)
    single = {n: None if t is None else t.detach().float().requires_grad_() for n, t in given.items()}
    same(run(gated_linear_attention, single), [t.float() for t in want], 2e-4)


@pytest.mark.parametrize("kind", DECAYS)
def test_hundred_thousand_steps(kind):
    """The memory of a long past fades to nothing, or is kept, and is never NaN."""
    state, steps = None, 8192
    given = {n: None if t is None else t.detach().float() for n, t in draw(steps, kind).items() if n != "state"}
    for _ in range(13):
        y, state = gated_linear_attention(**given, state=state)
    assert bool(torch.isfinite(y).all())
    assert bool(torch.isfinite(state).all())
    if kind != "none":
        same([state], [gated_linear_attention(**given)[1]], 1e-3)


def test_normaliser():
    """The channel of ones counts what the weights sum to."""
    q, k, v = (torch.rand(2, 3, 70, n, dtype=torch.float64) for n in (5, 5, 7))
    y, state = gated_linear_attention(q, k, with_ones(v))
    weights = (q @ k.mT).tril()
    same([y[..., :-1] / y[..., -1:]], [weights @ v / weights.sum(-1, keepdim=True)])
    same([state[..., -1]], [k.sum(2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["time", "channel", "delta"])
def test_half_precision(kind, dtype):
    """Sums are kept in single precision: only what comes in and goes out is rounded."""
    given = {n: None if t is None else t.detach().to(dtype) for n, t in draw(150, kind).items()}
    kernel = delta if kind == "delta" else gated_linear_attention
    y, state = kernel(**given)
    want, last = kernel(**{n: None if t is None else t.double() for n, t in given.items()})
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    same([y.double()], [want], 1e-2)
    same([state.double()], [last], 1e-4)


@pytest.mark.parametrize("time", [1, 5, 64, 150])
def test_flops(time):
    module = torch.nn.Identity()
    for kind, channels in (("none", False), ("head", False), ("time", False), ("channel", True)):
        given = {n: None if t is None else t.detach()[:1] if n in "qkv" else t for n, t in draw(time, kind).items()}
        given["state"] = given["state"].detach()[:1]
        given["decay"] = given["decay"][:1] if kind in ("time", "channel") else given["decay"]
        counted = count_flops(module, lambda given=given: gated_linear_attention(**given))
        assert counted == flops(time, HEADS, KEY, VALUE, channels)
    given = {n: t.detach()[:1] for n, t in draw(time, "delta").items()}
    assert count_flops(module, lambda: delta(**given)) == delta_rule.flops(time, HEADS, KEY, VALUE)


def test_no_tensor_is_as_large_as_the_square_of_the_length():
    """Of all that is kept for the backward, nothing grows faster than the length."""

    def largest(time: int) -> int:
        sizes = []
        given = draw(time, "channel")
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            gated_linear_attention(**given)
        return sum(sizes)

    assert largest(2048) < 2.1 * largest(1024)
