"""S4 and S4D against the systems that they stand for, written out with whole matrices."""

import pytest
import torch

import regard
from regard.bases.state_space import hippo
from regard.core import Context, Mixer, UserError, part, state_bytes

WIDTH, STATE = 5, 8


def make(spec, dtype=torch.float64):
    torch.manual_seed(2)
    return part(Mixer, spec, width=WIDTH).to(dtype)


def legs(state: int) -> tuple[torch.Tensor, torch.Tensor]:
    """HiPPO-LegS as it is published: A[n, k] = -sqrt(2n + 1) sqrt(2k + 1) below the diagonal, -(n + 1) on it."""
    matrix = torch.zeros(state, state, dtype=torch.float64)
    for n in range(state):
        for k in range(n + 1):
            matrix[n, k] = -(n + 1) if n == k else -(((2 * n + 1) * (2 * k + 1)) ** 0.5)
    return matrix, (2 * torch.arange(state, dtype=torch.float64) + 1).sqrt()


@pytest.mark.parametrize("state", [2, 8, 64])
def test_hippo(state):
    """b^T A^j b, which no change of basis changes."""
    matrix, vector = legs(state)
    imag, p, b = hippo(state)
    z, real = b, vector
    for _ in range(4):
        assert torch.allclose(2 * (b.conj() * z).real.sum(), vector @ real, rtol=1e-9)
        z = (-0.5 + 1j * imag) * z - p * 2 * (p.conj() * z).real.sum()
        real = matrix @ real


def test_s4_is_the_system_of_hippo():
    """Its kernel with C = b^T, against powers of the published matrix under the bilinear rule."""
    mixer, (matrix, b) = make({"part": "s4", "state": STATE}), legs(STATE)
    imag, p, half = hippo(STATE)
    with torch.no_grad():  # in double precision, which it was not born with
        mixer.imag.copy_(imag)
        mixer.log_real.fill_(torch.tensor(0.5, dtype=torch.float64).log())
        for ours, values in ((mixer.p, p), (mixer.b, half), (mixer.c, half.conj().resolve_conj())):
            ours.copy_(torch.view_as_real(values))
        kernel = mixer.kernel(13)
    for channel, dt in enumerate(mixer.log_dt.exp().tolist()):
        left, right = torch.eye(STATE) - dt / 2 * matrix, torch.eye(STATE) + dt / 2 * matrix
        z = torch.linalg.solve(left, dt * b)
        for at in range(13):
            assert abs(float(kernel[channel, at] - b @ z)) < 1e-9
            z = torch.linalg.solve(left, right @ z)


def test_s4_without_its_low_rank_is_s4d():
    s4, s4d = make({"part": "s4", "state": STATE}), make({"part": "s4d", "state": STATE, "rule": "bilinear"})
    with torch.no_grad():
        s4.p.zero_()
        s4d.load_state_dict({name: tensor for name, tensor in s4.state_dict().items() if name != "p"})
    x, context = torch.randn(2, 13, WIDTH, dtype=torch.float64), Context.begin(2, 13)
    assert torch.allclose(s4(x, context), s4d(x, context), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
def test_s4d_step_by_step(rule):
    mixer = make({"part": "s4d", "state": STATE, "rule": rule, "out": "none", "activation": "identity"})
    b, c = (torch.view_as_complex(t) for t in (mixer.b, mixer.c))
    dt, poles = mixer.log_dt.exp()[:, None], mixer.poles
    half = dt * poles / 2
    gate = (dt * poles).exp() if rule == "zoh" else (1 + half) / (1 - half)
    enter = (gate - 1) / poles * b if rule == "zoh" else dt / (1 - half) * b
    x, z, want = torch.randn(2, 13, WIDTH, dtype=torch.float64), torch.zeros(2, WIDTH, STATE // 2), []
    for t in range(13):
        z = gate * z + enter * x[:, t, :, None]
        want.append(2 * (c * z).sum(-1).real + mixer.skip * x[:, t])
    assert torch.allclose(mixer(x, Context.begin(2, 13)), torch.stack(want, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", [{"part": "s4"}, {"part": "s4d"}, {"part": "s4d", "init": "inv"}])
@torch.no_grad()
def test_long_and_single_precision(spec):
    """Whole, and in steps of more than one chunk: both near double precision after 2001 positions."""
    exact, mixer, time = make(spec), make(spec, torch.float32), 2001
    x = torch.randn(2, time, WIDTH)
    want = exact(x.double(), Context.begin(2, time))
    assert torch.allclose(mixer(x, Context.begin(2, time)).double(), want, rtol=0, atol=1e-4)
    state, at, outputs = mixer.start(Context.begin(2, 0), time), 0, []
    for count in (1, 130, 64, 1, time - 196):
        context = Context.after(torch.full((2,), at), count)
        y, state = mixer.step(x[:, at : at + count], state, context)
        outputs.append(y)
        at += count
    assert torch.allclose(torch.cat(outputs, 1).double(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("part_name", ["s4", "s4d"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_empty_rows(part_name, dtype):
    mixer = make({"part": part_name, "state": STATE}, dtype)
    x = torch.randn(3, 21, WIDTH).to(dtype).requires_grad_()
    valid = torch.arange(21)[None] < torch.tensor([21, 0, 5])[:, None]
    y = mixer(x, Context.begin(3, 21, valid=valid))
    y[valid].float().sum().backward()
    assert y.dtype == dtype
    assert bool(torch.isfinite(y).all())
    assert all(bool(torch.isfinite(t.grad).all()) for t in (x, *mixer.parameters()))
    _, state = mixer.step(x, mixer.start(Context.begin(3, 0), 21), Context.begin(3, 21, valid=valid))
    assert not state.z[1].any()
    assert state.z.dtype == torch.float32


@pytest.mark.parametrize("part_name", ["s4", "s4d"])
@torch.no_grad()
def test_a_hundred_thousand_steps(part_name):
    """Extreme decays are finite, and the effect of a distant input has vanished or remains."""
    mixer, time = make({"part": part_name, "state": 4}, torch.float32), 100_000
    mixer.log_dt.copy_(torch.linspace(-12, 6, WIDTH))
    x = torch.randn(1, time, WIDTH)
    y = mixer(x, Context.begin(1, time))
    steps, state = mixer.step(x, mixer.start(Context.begin(1, 0), time), Context.begin(1, time))
    assert bool(torch.isfinite(y).all())
    assert bool(torch.isfinite(state.z).all())
    assert torch.allclose(y, steps, rtol=0, atol=1e-2 * float(y.abs().max()))


@pytest.mark.parametrize("name", ["s4", "s4d"])
@torch.no_grad()
def test_the_state_does_not_grow(name):
    model = regard.build(name, size="tiny", vocab=11).eval()
    state, sizes = model.start(3, 300), []
    for count in (1, 70, 9):
        _, state = model.step(torch.randint(11, (3, count)), state)
        sizes.append(state_bytes(state.layers))
    assert sizes == [3 * model.cost(1).state] * 3


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"part": "s4", "state": 7}, "even"),
        ({"part": "s4d", "state": 0}, "even"),
        ({"part": "s4d", "init": "lim"}, "lin"),
        ({"part": "s4d", "rule": "zho"}, "zoh"),
        ({"part": "s4d", "out": "gul"}, "glu"),
        ({"part": "s4", "shortest": 0.5}, "shortest first"),
    ],
)
def test_refused(spec, says):
    with pytest.raises(UserError, match=says):
        make(spec)
