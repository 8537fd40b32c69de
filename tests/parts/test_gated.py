"""Gated attention units: GAU by its definition, FLASH by its own and as a GAU within a chunk, at any length."""

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.core import Context, Mixer, Position, UserError, part, state_bytes
from regard.parts.mixers import gau as gau_file
from regard.parts.mixers.flash import Flash
from regard.parts.mixers.gau import Gau
from regard.verify.laws import count_flops, max_difference


def lively(mixer: Mixer) -> Mixer:
    """Weights that are large enough to matter, biases that are not 0."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3))
    return mixer.double()


def inputs(batch: int, time: int, width: int) -> torch.Tensor:
    return torch.randn(batch, time, width, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def pieces(mixer: Mixer, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Values, gates and the queries and keys of a unit, by the paper."""
    unit = mixer.unit
    values, gates = F.silu(unit.into(x)).chunk(2, -1)
    z = F.silu(unit.base(x))
    return values, gates, *(z * gain + shift for gain, shift in zip(unit.offsets.gain, unit.offsets.shift, strict=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [None, 9])
def test_gau_is_its_definition(causal, length):
    mixer = lively(Gau(10, hidden=7, dim=4, pattern="causal" if causal else "everything", length=length))
    x = inputs(2, 13, 10)
    values, gates, q, k = pieces(mixer, x)
    mixed = torch.zeros_like(values)
    for i in range(13):
        for j in range(i + 1 if causal else 13):
            bias = mixer.position.table[mixer.position.bucket(torch.tensor(j - i)), 0].detach()
            n = length or (i + 1 if causal else 13)
            weight = F.relu((q[:, i] * k[:, j]).sum(-1) / n + bias) ** 2
            mixed[:, i] += weight[:, None] * values[:, j]
    assert max_difference(mixer(x, Context.begin(2, 13)).detach(), mixer.unit.out(gates * mixed).detach()) < 1e-12


@pytest.mark.parametrize("pattern", ["causal", "everything"])
@pytest.mark.parametrize("weights", ["relu_squared", "softmax"])
def test_long_sequences_in_blocks(monkeypatch, pattern, weights):
    """Blocks give the same outputs and gradients as one pass, at the cost that `cost` declares."""
    mixer = lively(Gau(10, hidden=7, dim=4, pattern=pattern, weights=weights))
    valid = torch.arange(13)[None] < torch.tensor([13, 5])[:, None]
    found = []
    for block in (512, 5):
        monkeypatch.setattr(gau_file, "QUERY_BLOCK", block)
        x = inputs(2, 13, 10).requires_grad_()
        y = mixer(x, Context.begin(2, 13, valid=valid))[valid]
        mixer.zero_grad()
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad.clone() for p in mixer.parameters())])
        whole = x.detach()[:1]
        with torch.no_grad():
            counted = count_flops(mixer, lambda whole=whole: mixer(whole, Context.begin(1, 13)))
        assert counted == mixer.cost(13).flops
    for one, two in zip(*found, strict=True):
        assert max_difference(one, two) < 1e-10


def test_laplace_meets_relu_squared():
    """The two activations agree in value and slope at sqrt(1/2)."""
    for bend in gau_file.ACTIVATIONS.values():
        x = torch.tensor(0.5, dtype=torch.float64).sqrt().requires_grad_()
        y = bend(x)
        (slope,) = torch.autograd.grad(y, x)
        assert (float(y.detach()), float(slope)) == (pytest.approx(0.5), pytest.approx(2**0.5))


@pytest.mark.parametrize("causal", [True, False])
def test_flash_within_a_chunk_is_gau(causal):
    """Within the first chunk FLASH is a GAU: the linear part adds nothing."""
    chunk = 11
    flash = lively(Flash(10, hidden=7, dim=4, chunk=chunk, causal=causal))
    gau = Gau(10, hidden=7, dim=4, pattern="causal" if causal else "everything", position=flash.position, length=chunk)
    state = flash.state_dict()
    for name in ("unit.offsets.gain", "unit.offsets.shift"):
        state[name] = state[name][[0, 2]]
    gau.double().load_state_dict(state)
    with torch.no_grad():
        flash.unit.offsets.gain[3], flash.unit.offsets.shift[3] = (0.0, 0.0) if not causal else (1.0, 1.0)
    for time in (1, 7, chunk):
        x = inputs(2, time, 10)
        assert (
            max_difference(flash(x, Context.begin(2, time)).detach(), gau(x, Context.begin(2, time)).detach()) < 1e-12
        )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("time", "chunk"), [(1, 4), (12, 4), (13, 4), (9, 1)])
def test_flash_is_its_definition(causal, time, chunk):
    mixer = lively(Flash(10, hidden=7, dim=4, chunk=chunk, causal=causal, position="none"))
    x = inputs(2, time, 10)
    values, gates, near_q, far_q, near_k, far_k = pieces(mixer, x)
    mixed = torch.zeros_like(values)
    for i in range(time):
        for j in range(time):
            if i // chunk == j // chunk and (j <= i or not causal):
                mixed[:, i] += F.relu((near_q[:, i] * near_k[:, j]).sum(-1, True) / chunk) ** 2 * values[:, j]
            if j // chunk < i // chunk or not causal:
                share = chunk if causal else time
                mixed[:, i] += (far_q[:, i] * far_k[:, j]).sum(-1, True) / share * values[:, j]
    assert max_difference(mixer(x, Context.begin(2, time)).detach(), mixer.unit.out(gates * mixed).detach()) < 1e-12


def test_flash_grows_with_length_alone():
    """Twice the length is twice the work; the state and the cost of a token are the same at any position."""
    mixer = Flash(10, hidden=7, dim=4, chunk=16)
    assert mixer.cost(16384).flops == 16 * mixer.cost(1024).flops
    assert mixer.cost(1, 100) == mixer.cost(1, 16000)
    begun = [state_bytes(mixer.start(Context.begin(2, 0), room)) for room in (10, 100_000)]
    assert begun[0] == begun[1] == 2 * mixer.cost(1, 50_000).state


def test_flash_counts_whole_chunks():
    """The work of a sequence from its beginning, more than a chunk long."""
    mixer = lively(Flash(10, hidden=7, dim=4, chunk=4))
    with torch.no_grad():
        assert count_flops(mixer, lambda: mixer(inputs(1, 13, 10), Context.begin(1, 13))) == mixer.cost(13).flops


def test_flash_goes_on_for_long():
    """Long sequences in half precision stay finite and close to float64."""
    mixer = lively(Flash(8, hidden=6, dim=4, chunk=64, position="rotary"))
    with torch.no_grad():
        mixer.unit.offsets.gain.mul_(0.3)
    x = inputs(1, 20_000, 8)
    context = Context.begin(1, 20_000)
    with torch.no_grad():
        exact = mixer(x, context)
        halved = mixer.bfloat16()
        state = halved.start(context, 1)
        assert state.past.dtype == torch.float32
        y = halved(x.bfloat16(), context)
        _, state = halved.step(x[:, :70].bfloat16(), state, Context.after(torch.tensor([0]), 70))
    assert state.past.dtype == torch.float32
    assert bool(torch.isfinite(exact).all())
    assert float((y.double() - exact).abs().max() / exact.abs().max()) < 0.1


def test_both_adds_and_turns():
    both = part(Position, {"part": "both", "one": "rotary", "two": "alibi"}, width=24, heads=3, dim=8)
    alone = [part(Position, name, width=24, heads=3, dim=8) for name in ("rotary", "alibi")]
    q, at = torch.randn(2, 3, 5, 8), torch.arange(5)[None]
    assert torch.equal(both.query(q, at), alone[0].query(q, at))
    places = at[:, None, :, None], at[:, None, None, :]
    assert torch.equal(both.bias(*places, q), alone[1].bias(*places, q))
    assert [both.acts(place) for place in ("query", "key", "bias", "output_bias")] == [True, True, True, False]
    assert both.relative


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"part": "gau", "weights": "softmx"}, "unknown weights 'softmx'.*did you mean 'softmax'"),
        ({"part": "gau", "length": 0}, "length must be at least 1"),
        ({"part": "gau", "position": "shaw"}, "position 'shaw' does not fit a gated unit"),
        ({"part": "gau", "position": "sinusoidal"}, "position 'sinusoidal' acts on token vectors"),
        ({"part": "gau", "position": "shared"}, "needs a position in the enclosing stack"),
        ({"part": "flash", "chunk": 0}, "chunk must be at least 1"),
        ({"part": "flash", "weights": "softmax"}, "unknown weights 'softmax'"),
        ({"part": "gau", "position": {"part": "both", "one": "shaw", "two": "shaw"}}, "only one of the two positions"),
    ],
)
def test_bad_arguments(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        part(Mixer, spec, width=24, heads=3)


def test_what_cannot_be_done_is_told():
    gau, flash = Gau(10, dim=4, pattern="everything"), Flash(10, dim=4, causal=False)
    context = Context.begin(2, 3)
    for mixer in (gau, flash):
        with pytest.raises(UserError, match="does not step"):
            mixer.step(torch.zeros(2, 3, 10), mixer.start(context, 3), context)


def test_too_small_a_state_grows():
    mixer, x, context = Gau(10, dim=4), torch.randn(2, 13, 10), Context.begin(2, 13)
    torch.testing.assert_close(mixer.step(x, mixer.start(context, 2), context)[0], mixer(x, context))


def test_layers_that_share_a_position_keep_their_own_weights_of_it():
    """As attention does: FLOATER shares the flow between layers, and each layer has a start of its own."""
    layer = {"mixer": {"part": "gau", "position": "shared", "dim": 16}, "wiring": "pre"}
    model = {"kind": "decoder", "width": 16, "heads": 1, "depth": 2, "position": {"part": "floater", "step": 4}}
    made = regard.build({"model": model | {"layer": [layer]}, "vocab": 31})
    one, two = (layer.branches["mixer"].position for layer in made.stack.layers)
    assert one is not two
    assert one.flow is two.flow
