"""Infini-attention against the paper's equations written out, and what is special about it."""

import pytest
import torch

from regard.core import Context, Mixer, Pattern, UserError, part, state_bytes
from regard.parts.mixers.infini import Infini


def make(**given) -> Infini:
    torch.manual_seed(0)
    mixer = Infini(24, 3, **({"segment": 5, "position": "none"} | given)).double()
    torch.nn.init.normal_(mixer.beta)
    return mixer


def by_hand(mixer: Infini, x: torch.Tensor) -> torch.Tensor:
    """One sequence (time, width), head by head and position by position."""
    q, k, v = (m(x).unflatten(-1, (mixer.heads, mixer.dim)) for m in (mixer.q, mixer.k, mixer.v))
    share, rows = torch.sigmoid(mixer.beta), []
    for begin in range(0, len(x), mixer.segment):
        old = range(0, begin)
        if begin == 0:
            memory = [(torch.zeros(mixer.dim, mixer.dim).double(), torch.zeros(mixer.dim).double())] * mixer.heads
        for at in range(begin, min(begin + mixer.segment, len(x))):
            heads = []
            for head in range(mixer.heads):
                here = slice(begin, at + 1)
                weights = (k[here, head] @ q[at, head] / mixer.dim**0.5).softmax(0)
                local = weights @ v[here, head]
                asked = torch.nn.functional.elu(q[at, head]) + 1
                matrix, sums = memory[head]
                heads.append(
                    share[head] * (asked @ matrix) / (asked @ sums) + (1 - share[head]) * local if len(old) else local
                )
            rows.append(torch.cat(heads))
        seen = slice(begin, begin + mixer.segment)
        after = []
        for head, (matrix, sums) in enumerate(memory):
            new, values = torch.nn.functional.elu(k[seen, head]) + 1, v[seen, head]
            if mixer.update == "delta" and begin:
                values = values - (new @ matrix) / (new @ sums)[:, None]
            after.append((matrix + new.T @ values, sums + new.sum(0)))
        memory = after
    return mixer.out(torch.stack(rows))


@pytest.mark.parametrize("update", ["linear", "delta"])
@torch.no_grad()
def test_the_paper_s_equations(update):
    mixer, x = make(update=update), torch.randn(2, 18, 24).double()
    y = mixer(x, Context.begin(2, 18))
    for row in range(2):
        torch.testing.assert_close(y[row], by_hand(mixer, x[row]), rtol=0, atol=1e-12)


@torch.no_grad()
def test_reaches_back_many_segments_and_the_state_stays():
    mixer, x = make(), torch.randn(1, 40, 24).double()
    other = x.clone()
    other[:, 2] += 1
    far = (mixer(x, Context.begin(1, 40)) - mixer(other, Context.begin(1, 40)))[0].abs().sum(-1)
    assert bool((far[2:] > 1e-9).all())
    assert not far[:2].any()
    held = [state_bytes(mixer.start(Context.begin(1, 0), capacity)) for capacity in (5, 6, 40, 100_000)]
    assert len(set(held)) == 1
    assert mixer.cost(1, 100_000).state == held[0]
    assert mixer.cost(1, 99_998) == mixer.cost(1, 998), "the same work, however much is remembered"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_and_rows_without_anything(dtype):
    """The sums over 100,000 positions are kept in single precision: in half they would not even be finite."""
    mixer = make(segment=64).to(dtype)
    valid = torch.arange(130) < torch.tensor([[130], [0], [7]])
    x = torch.randn(3, 130, 24, dtype=dtype)
    y, state = mixer.step(x, mixer.start(Context.begin(3, 0), 130), Context.begin(3, 130, valid=valid))
    assert y.dtype == dtype
    assert bool(y.isfinite().all())
    assert state.memory.dtype == torch.float32
    assert not state.memory[1:].any(), "nothing was full"
    for _ in range(1600):
        state = state._replace(memory=mixer.absorb(state))
    assert float(state.memory[0, :, :, -1].max()) > 65504
    late = Context.after(torch.tensor([64 * 1602] * 3), 64)
    y, _ = mixer.step(x[:, :64], state, late)
    assert bool(y.isfinite().all())


def test_features_of_nothing_leave_gradients_finite():
    """elu(x) + 1 is 0 for very negative x: the divisor is then 0."""
    mixer = make(update="delta")
    with torch.no_grad():
        for m in (mixer.q, mixer.k):
            m.weight.zero_()
            m.bias = torch.nn.Parameter(torch.full((24,), -1e4, dtype=torch.float64))
    x = torch.randn(2, 17, 24, dtype=torch.float64, requires_grad=True)
    mixer(x, Context.begin(2, 17)).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in (x, *mixer.parameters()) if p.grad is not None)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"segment": 0}, "segment must be at least 1"),
        ({"update": "sum"}, "must be 'linear' or 'delta'"),
        ({"position": "sinusoidal"}, "acts on token vectors"),
        ({"heads": 5}, "not divisible by 5 heads"),
    ],
)
def test_bad_arguments(given, sentence):
    with pytest.raises(UserError, match=sentence):
        part(Mixer, {"part": "infini", **given}, width=24, heads=3)


def test_too_small_a_state_grows():
    mixer, x, context = make(), torch.randn(1, 14, 24).double(), Context.begin(1, 14)
    torch.testing.assert_close(mixer.step(x, mixer.start(Context.begin(1, 0), 1), context)[0], mixer(x, context))


def test_a_pattern_that_comes_too_late():
    mixer = make()
    with pytest.raises(UserError, match="the memory holds all positions"):
        mixer(torch.randn(1, 4, 24).double(), Context.begin(1, 4, pattern=Pattern.parse("block(2)")))
