"""Recurrent memory: against the inner stack called by hand, and its special cases."""

import pytest
import torch

import regard
from regard.core import Context, Mixer, Pattern, UserError, part, state_bytes

LAYER = {"mixer": "attention", "feedforward": {"part": "mlp", "hidden": 20}, "wiring": "pre"}
SPEC = {
    "part": "recurrent_memory",
    "segment": 4,
    "memory": 3,
    "depth": 2,
    "norm": "layer",
    "position": {"part": "learned", "length": 10},
    "layer": [LAYER],
}


def make(**given) -> Mixer:
    torch.manual_seed(0)
    return part(Mixer, SPEC | given, width=24, heads=3).double()


@torch.no_grad()
def test_the_paper_s_equation():
    """Every segment between its memories, through the stack at once; the last one is short."""
    mixer, x = make(), torch.randn(2, 14, 24).double()
    memory, outputs = mixer.memory.expand(2, 3, 24), []
    for piece in x.split(4, 1):
        whole = torch.cat((memory, piece, memory), 1)
        context = Context.begin(2, whole.shape[1])
        y = mixer.stack(mixer.position.embed(whole, context.positions), context)
        outputs.append(y[:, 3:-3])
        memory = y[:, -3:]
    torch.testing.assert_close(mixer(x, Context.begin(2, 14)), torch.cat(outputs, 1), rtol=0, atol=1e-12)


def test_only_the_memory_carries_on():
    """A gradient finds its way from the last segment to the first, and none does when the memory is not written."""
    mixer = make()
    for written in (True, False):
        x = torch.randn(1, 14, 24, dtype=torch.float64, requires_grad=True)
        state, at = mixer.start(Context.begin(1, 0), 14), torch.zeros(1, dtype=torch.long)
        for piece in x.split(4, 1):
            if not written:
                state = state._replace(memory=mixer.memory[None], inner=mixer.start(Context.begin(1, 0), 0).inner)
                at = torch.zeros_like(at)
            y, state = mixer.step(piece, state, Context.after(at, piece.shape[1]))
            at = at + piece.shape[1]
        (y * torch.randn_like(y)).sum().backward()
        assert bool(x.grad[:, :4].any()) == written


def test_the_state_stays_and_so_does_the_work():
    mixer = make()
    held = {state_bytes(mixer.start(Context.begin(1, 0), capacity)) for capacity in (1, 14, 100_000)}
    assert held == {mixer.cost(3, 5).state} == {mixer.cost(1, 99_999).state}
    assert mixer.cost(1, 99_999) == mixer.cost(1, 3)
    assert mixer.cost(4000).flops == pytest.approx(1000 * mixer.cost(4, 4).flops, rel=1e-2)


def test_places_inside_do_not_limit_the_sequence():
    table = {"kind": "decoder", "width": 24, "heads": 3, "layer": [{"mixer": SPEC, "wiring": "plain"}]}
    model = regard.build({"vocab": 11, "model": table})
    assert model.limit is None
    assert model(torch.zeros(1, 50, dtype=torch.long)).shape == (1, 50, 11)
    table["embed"] = {"part": "tokens", "position": {"part": "learned", "length": 20}}
    assert regard.build({"vocab": 11, "model": table}).limit == 20


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_and_rows_without_anything(dtype):
    mixer = make().to(dtype)
    valid = torch.arange(13) < torch.tensor([[13], [0], [5]])
    x = torch.randn(3, 13, 24, dtype=dtype)
    whole = mixer(x, Context.begin(3, 13, valid=valid))
    steps, _ = mixer.step(x, mixer.start(Context.begin(3, 0), 13), Context.begin(3, 13, valid=valid))
    for y in (whole, steps):
        assert y.dtype == dtype
        assert bool(y.isfinite().all())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"segment": 0}, "must be at least 1"),
        ({"memory": 0}, "must be at least 1"),
        ({"segment": 5}, "'learned' has 10 positions, and a segment with memory 11"),
        ({"position": "rotary"}, "acts in attention"),
        ({"layer": [{"mixer": {"part": "attention", "pattern": "everything"}}]}, "looks ahead"),
        ({"layer": []}, "at least one layer"),
        ({"layer": [{"mixer": {"part": "gru", "hidden": 7}, "wiring": "plain"}]}, "changes? width 24 to 7"),
        ({"layer": [{"mixer": "atention"}]}, "did you mean 'attention'"),
    ],
)
def test_bad_arguments(given, sentence):
    with pytest.raises(UserError, match=sentence):
        make(**given)


def test_a_pattern_that_comes_too_late():
    with pytest.raises(UserError, match="the memory holds all positions"):
        make()(torch.randn(1, 4, 24).double(), Context.begin(1, 4, pattern=Pattern.parse("block(2)")))
