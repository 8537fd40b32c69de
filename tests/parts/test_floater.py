"""FLOATER: the equation is solved correctly, positions do not depend on the sequence, and the cache never goes
stale."""

import math

import pytest
import torch

import regard
from regard.core import Context, Position, UserError, part
from regard.core.stack import Stack
from regard.verify import laws


def make(heads: int = 3, dim: int = 8, **given) -> Position:
    torch.manual_seed(0)
    position = part(Position, {"part": "floater", **given}, heads=heads, dim=dim).double()
    with torch.no_grad():
        position.flow.out.weight.normal_(std=0.2)  # so that the motion depends on where p is
    return position


def fading(rate: float, **given) -> Position:
    """dp/dt = -rate p: relu is the identity where its input is above 0."""
    position = make(**given)
    channels = position.begin.shape[1]
    with torch.no_grad():
        for layer in (position.flow.into, position.flow.out):
            layer.weight.zero_()
        position.flow.into.weight[:, :channels] = torch.eye(channels)
        position.flow.into.bias.fill_(50.0)
        position.flow.out.weight[:, :channels] = -rate * torch.eye(channels)
        position.flow.out.bias.fill_(rate * 50.0)
    return position


@pytest.mark.parametrize(("step", "near"), [(0.2, 1e-9), (1, 1e-6), (4, 1e-4), (8, 1e-3)])
@pytest.mark.parametrize("learning", [True, False])
def test_an_equation_with_a_known_solution(step, near, learning):
    position = fading(1.5, dt=0.05, step=step)
    with torch.set_grad_enabled(learning):
        for role in range(3):
            found = position.vectors(role, 41).detach()
            time = 0.05 * torch.arange(41, dtype=torch.float64)[:, None]
            assert laws.max_difference(found, position.begin[role].detach() * torch.exp(-1.5 * time)) < near


def test_time_itself_moves_it():
    """dp/dt = a t: p = p(0) + a t^2 / 2, which the solver and its cubic interpolation reproduce exactly."""
    position = make(dt=0.1, step=4)
    with torch.no_grad():
        position.flow.out.weight.zero_()
        position.flow.out.bias.zero_()
        position.flow.out.weight[:, -1] = 3.0
    time = 0.1 * torch.arange(23, dtype=torch.float64)[:, None]
    assert laws.max_difference(position.vectors(1, 23).detach(), position.begin[1].detach() + 1.5 * time**2) < 1e-12


@pytest.mark.parametrize("step", [0.5, 1, 5])
def test_a_place_does_not_depend_on_the_length(step):
    position = make(step=step, dt=0.1)
    long = position.vectors(0, 71).detach()
    for count in (1, 2, 13, 70):
        assert laws.max_difference(position.vectors(0, count).detach(), long[:count]) < 1e-14
    with torch.no_grad():
        assert laws.max_difference(position.vectors(0, 71), long) < 1e-12


@pytest.mark.parametrize("name", ["begin", "flow.into.weight", "flow.out.bias"])
def test_what_is_kept_follows_the_parameters(name):
    position, from_start = make(dt=0.1), make(dt=0.1)
    q, at = torch.zeros(2, 3, 13, 8, dtype=torch.float64), torch.arange(13)[None]
    with torch.no_grad():
        before = position.key(q, at)
        position.get_parameter(name).mul_(1.5)
        from_start.load_state_dict(position.state_dict())
        assert torch.equal(position.key(q, at), from_start.key(q, at))
        assert laws.max_difference(position.key(q, at), before) > 1e-3


def test_kept_places_can_be_met_again_in_training():
    position = make(dt=0.1).requires_grad_(False)
    at, q = torch.arange(13)[None], torch.randn(2, 3, 13, 8, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        first = position.query(q, at)
    again = position.query(q, at)
    again.sum().backward()
    assert torch.equal(first, again)
    assert torch.equal(q.grad, torch.ones_like(q))


def test_fewer_heads_of_keys():
    """Fewer key heads take the first channels."""
    position = make()
    at = torch.arange(7)[None]
    all_heads = position.key(torch.zeros(2, 3, 7, 8, dtype=torch.float64), at)
    one = position.key(torch.zeros(2, 1, 7, 8, dtype=torch.float64), at)
    assert torch.equal(one, all_heads[:, :1])


def test_layers_flow_alike_from_beginnings_of_their_own():
    torch.manual_seed(0)
    layer = {"mixer": {"part": "attention", "position": "shared", "bias": "o"}, "wiring": "pre"}
    stack = Stack(width=24, heads=3, depth=3, layer=layer, position={"part": "floater", "dt": 0.1})
    parts = [layer.branches["mixer"].position for layer in stack.layers]
    assert len({id(p.flow) for p in parts}) == 1
    assert len({id(p.begin) for p in parts}) == 3
    stack(torch.randn(2, 13, 24), Context.begin(2, 13)).square().sum().backward()
    for p in parts:
        assert bool((p.begin.grad.abs().sum(1) > 0).all())
    assert float(parts[0].flow.out.weight.grad.abs().sum()) > 0
    assert sum("flow" in name for name, _ in stack.named_parameters()) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_far_places_are_finite_at_birth(dtype):
    torch.manual_seed(0)
    position = part(Position, "floater", heads=4, dim=16).to(dtype)
    with torch.no_grad():
        x = position.query(torch.zeros(1, 4, 1, 16, dtype=dtype), torch.tensor([[16384]]))
    assert x.dtype == dtype
    assert bool(torch.isfinite(x).all())


def test_half_floats_are_solved_in_single_precision():
    position = make(dt=0.1, step=1).bfloat16()
    exact = make(dt=0.1, step=1)
    exact.load_state_dict(position.state_dict())
    found, want = (p.vectors(2, 200).detach().double() for p in (position, exact))
    assert laws.max_difference(found, want) < 1e-3


def test_it_tells_places_apart():
    """Equal tokens at different positions have different vectors."""
    overrides = ["model.position={part='floater'}", "model.layer.0.mixer.position=shared"]
    torch.manual_seed(0)
    model = regard.build("transformer-decoder", size="tiny", vocab=17, overrides=overrides).double().eval()
    with torch.no_grad():
        y = model.hidden(torch.zeros(1, 13, dtype=torch.long), Context.begin(1, 13))[0]
    assert torch.pdist(y).min() > 1e-3


@pytest.mark.parametrize("given", [{"step": 0.3}, {"step": 2.5}, {"step": 0}, {"dt": 0.0}, {"step": -1}])
def test_bad_arguments(given):
    with pytest.raises(UserError, match="a whole number or 1 over one"):
        make(**given)


def test_the_step_of_the_original():
    """0.002 over 0.01, in floats."""
    assert make(dt=0.01, step=0.002 / 0.01).steps == 5
    assert math.isclose(make(step=16).every, 16)
