"""Decoding sessions: a fused step is the plain one, and is taken only while nothing in the model was touched."""

import copy
import pickle
import weakref

import pytest
import torch

import regard
from regard.core import Position, select
from regard.decode.session import Session
from regard.native import build, decode
from regard.ops import dispatch
from regard.verify import laws
from tests.models import shallow

pytestmark = pytest.mark.skipif(build.load_kernels() is None, reason="there is no compiler")
CLOSE = {torch.float32: 2e-5, torch.float64: 1e-12}


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=CLOSE[found.dtype] * max(1.0, float(wanted.abs().max())))


def taken(model, monkeypatch=None, steps=7, between=lambda at, state: state, rows=3, fused=True):
    """Scores, and how many branches each call of a kernel took."""
    torch.manual_seed(2)
    given = model.random_inputs(rows, steps)
    tokens, calls, scores, run = given.pop("tokens"), [], [], decode.Program.run

    def counted(own, *more):
        calls.append(len(own.branches))
        return run(own, *more)

    if monkeypatch:
        monkeypatch.setattr(decode.Program, "run", counted)
    with torch.no_grad():
        memory = model.encode(given["source"]) if given else None
        stepper = Session(model) if fused else model
        state = stepper.start(rows, steps + 2, memory=memory)
        calls.clear()
        for at in range(steps):
            state = between(at, state)
            one, state = stepper.step(tokens[: len(state.lengths), at : at + 1], state)
            scores.append(one.flatten())
    return torch.cat(scores), calls


class Slope(Position):
    """A bias whose slope is a buffer."""

    def __init__(self, slope):
        super().__init__()
        self.register_buffer("slope", torch.tensor(slope))

    def bias(self, query_at, key_at, q):
        return (self.slope * (key_at - query_at)).to(q.dtype)


def test_positions_with_buffers_of_their_own_are_told_apart(monkeypatch):
    torch.manual_seed(1)
    model = regard.build("alibi", size="tiny", vocab=61).eval().double()
    for index, layer in enumerate(model.stack.layers):
        layer.branches["mixer"].position = Slope(0.5 * index).eval()
    found, calls = taken(model, monkeypatch)
    assert calls
    near(found, taken(model, fused=False)[0])


WHOLE = ["transformer", "transformer-preln", "gpt2", "bloom", "mpt", "bart", "llama", "mistral", "qwen", "rotary"]


@pytest.mark.pairwise
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("rows", [3, 40])
def test_a_step_of_a_whole_stack_is_that_of_its_parts(name, rows, threads, monkeypatch):
    """By one call of a kernel, which is indeed what happens; also where rows go and change places."""
    torch.manual_seed(1)
    model = regard.build(name, size="tiny", vocab=61).eval()
    depth = sum(len(layer.mixers) for layer in model.stack.layers)

    def between(at, state):
        if at == 3:
            return model.reorder(state, torch.arange(rows).flip(0))
        return select(state, torch.tensor([1, 0])) if at == 5 else state

    for change in (lambda at, state: state, between):
        found, calls = taken(model, monkeypatch, between=change, rows=rows)
        assert calls == [depth] * 7
        monkeypatch.undo()
        near(found, taken(model, between=change, rows=rows, fused=False)[0])


@pytest.mark.parametrize("rows", [3, 40])
def test_a_stack_that_changes_between_steps_is_seen(rows, monkeypatch):
    """Weights in place, weights elsewhere, other linear maps, watchers, and a fused optimizer."""
    model = regard.build("gpt2", size="tiny", vocab=61).eval()
    attention = model.stack.layers[1].branches["mixer"]
    seen = []

    def change(at, state):
        if at == 1:
            attention.q.weight.mul_(1.5)
        if at == 2:
            attention.k.weight.data = attention.k.weight.data * 1.5
            attention.q.bias.data = attention.q.bias.data + 1.5
        if at == 3:
            linear = torch.nn.Linear(model.width, model.width).eval()  # or no step would be fused from here on
            linear.weight.copy_(attention.v.weight * 2)
            attention.v = linear.requires_grad_(False)
        if at == 4:
            model.stack.layers[0].out.watchers.append(lambda x: seen.append(x.clone()))
        if at == 5:
            model.stack.layers[0].out.watchers.clear()
        if at == 6:
            with torch.enable_grad():
                optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
                model(torch.arange(6)[None]).square().mean().backward()
                optimizer.step()
        return state

    begin = copy.deepcopy(model)
    wanted = copy.deepcopy(model)
    found = taken(model, between=change, rows=rows)[0]
    model, attention = wanted, wanted.stack.layers[1].branches["mixer"]
    near(found, taken(wanted, between=change, rows=rows, fused=False)[0])
    near(*seen)
    assert not torch.allclose(found, taken(begin, rows=rows)[0])


def test_a_model_that_has_stepped_can_be_copied_and_pickled():
    model = regard.build("gpt2", size="tiny", vocab=61).eval()
    found = taken(model)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(taken(other)[0], found)


def test_a_cache_is_not_kept_when_nobody_wants_it():
    model = regard.build("gpt2", size="tiny", vocab=61).eval()
    with torch.no_grad():
        session = Session(model)
        _, state = session.step(torch.zeros(2, 1, dtype=torch.long), session.start(2, 5))
    keys = weakref.ref(state.layers[0][0].keys)
    del state, session
    assert keys() is None


@pytest.mark.parametrize("name", ["transformer", "gpt2", "llama", "t5", "alibi"])
def test_the_laws_hold_without_them(name, monkeypatch):
    monkeypatch.setattr(dispatch, "load_kernels", lambda: None)
    assert dispatch.inference_kernels(torch.randn(2)) is None
    torch.manual_seed(1)
    model = shallow(name).eval()
    for finding in laws.check(model, without=["edited"]):  # which compares with them
        assert finding.holds, f"{finding.law}: {finding.worst:.2e}"


@pytest.mark.parametrize("rows", [3, 40])
def test_weights_changed_without_a_sign_count_from_the_next_start(rows):
    """`.data` and fused optimizers tell no version: a session that is used again packs weights anew."""
    torch.manual_seed(1)
    model = regard.build("gpt2", size="tiny", vocab=61).eval()
    tokens, session = torch.randint(61, (rows, 5)), Session(model)

    def steps(stepper):
        state, found = stepper.start(rows, 5), []
        for at in range(5):
            y, state = stepper.step(tokens[:, at : at + 1], state)
            found.append(y)
        return torch.cat(found, 1)

    with torch.no_grad():
        before = steps(session)
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        found = steps(session)
        near(found, steps(model))
    assert float((found - before).abs().max()) > 0.1
