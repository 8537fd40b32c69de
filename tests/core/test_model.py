"""What a model refuses, and how its states share buffers."""

import copy
import pickle

import pytest
import torch

import regard
from regard.core import State, UserError, join, select
from regard.decode.session import Session
from regard.files import recipe as recipes
from tests.models import shallow


def test_a_state_of_another_model_is_refused():
    """Of another kind, depth or width; one that fits is not the cause of what else goes wrong."""
    made = {}
    for name, base, changes in (
        ("attention", "transformer-decoder", []),
        ("shallow", "transformer-decoder", ["model.depth=2"]),
        ("retention", "retnet", []),
        ("narrow", "retnet", ["model.width=64"]),
        ("system", "s4d", []),
        ("narrow system", "s4d", ["model.width=64"]),
        ("pairs", "transformer", []),
        ("recurrent", "seq2seq-bahdanau", []),
    ):
        made[name] = regard.build(recipes.load(base, "tiny", changes) | {"vocab": 17})
    tokens = torch.randint(17, (2, 3))

    def start(model):
        return model.start(2, 5, source=tokens if model.encoder is not None else None)

    for one, two in (("attention", "retention"), ("retention", "attention"), ("attention", "shallow"),
                     ("retention", "narrow"), ("system", "narrow system"),
                     ("pairs", "recurrent"), ("recurrent", "pairs")):  # fmt: skip
        with pytest.raises(regard.UserError, match="another model"):
            made[one].step(tokens, start(made[two]))
    with pytest.raises(regard.UserError, match="not NoneType"):
        made["attention"].step(tokens, None)


def test_a_state_that_was_given_up_is_refused():
    """Nor may those be stepped from that share its buffers; a copy from before may."""
    model = regard.build("gpt2", size="tiny", vocab=17).eval()
    tokens = torch.randint(17, (2, 6))
    with torch.no_grad():
        _, first = model.step(tokens[:, :3], model.start(2, 9))
        kept = first.copy()
        _, second = model.step(tokens[:, 3:5], first)
        third = model.reorder(second, torch.tensor([1, 0]))
        for state in (first, second):
            with pytest.raises(regard.UserError, match="given up"):
                model.step(tokens[:, 5:], state)
            with pytest.raises(regard.UserError, match="given up"):
                model.reorder(state, torch.tensor([0, 1]))
        model.step(tokens[:, 5:], third)
        y, _ = model.step(tokens[:, 3:], kept)
        torch.testing.assert_close(y, model(tokens)[:, 3:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "local", "yoco", "infini", "reformer"])
def test_gradients_through_a_cache_that_grows(name):
    """What was read before it grew is wanted as it was, also where queries alone learn."""
    torch.manual_seed(0)
    model = regard.build(name, size="tiny", vocab=17).eval().double()
    tokens = torch.randint(17, (2, 30))
    for learning in (list(model.parameters()), [p for n, p in model.named_parameters() if n.endswith("q.weight")]):
        for parameter in model.parameters():
            parameter.requires_grad_(any(parameter is one for one in learning))
        weights = torch.randn(2, 30, 17, dtype=torch.float64)

        def gradients(y, learning=learning, weights=weights):
            return torch.autograd.grad((y * weights).sum(), learning, materialize_grads=True)

        whole = gradients(model(tokens))
        with torch.no_grad():
            roomy = model.start(2, 60).copy()  # which is cut down, and could grow where it lies
        for state, copied in ((model.start(2, 1), False), (model.start(2, 60), True), (roomy, False)):
            parts = []
            for begin, end in ((0, 1), (1, 2), (2, 12), (12, 13), (13, 29), (29, 30)):
                y, state = model.step(tokens[:, begin:end], state)
                state = state.copy() if copied and begin == 0 else state
                parts.append(y)
            for one, other in zip(gradients(torch.cat(parts, 1)), whole, strict=True):
                torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def make(name):
    torch.manual_seed(0)
    return regard.build(name, size="tiny", vocab=17).eval().double()


@pytest.mark.parametrize("name", ["mistral", "local", "infini", "yoco", "gpt2"])
def test_steps_without_gradients_leave_those_before_them_alone(name):
    """A backward pass wants keys as they were, also in slots that later positions take over."""
    model, tokens = make(name), torch.randint(17, (2, 300))

    def gradients(go_on):
        model.zero_grad()
        with torch.no_grad():
            _, state = model.step(tokens[:, :150], model.start(2, 300))
        y, state = model.step(tokens[:, 150:155], state)
        with torch.no_grad():
            _, state = model.step(tokens[:, 155:158], state)
            for at in range(158, 300) if go_on else ():
                _, state = model.step(tokens[:, at : at + 1], state)
        y.sin().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "transformer-xl"])
def test_a_state_of_other_numbers_is_refused(name):
    """Kernels would read and write beyond its end."""
    model, tokens = make(name).float(), torch.randint(17, (2, 9))
    with torch.no_grad():
        _, state = model.step(tokens[:, :3], model.start(2, 9))
        _, state = model.step(tokens[:, 3:4], state)
        model.double()
        for many in (1, 3):
            with pytest.raises(regard.UserError, match="belongs to another model"):
                model.step(tokens[:, 4 : 4 + many], state)


@pytest.mark.parametrize("name", ["gpt2", "transformer-xl", "rwkv4", "s4d", "seq2seq-bahdanau"])
def test_states_leave_inference_mode(name):
    model, tokens = make(name), torch.randint(17, (2, 9))
    given = {} if model.encoder is None else {"source": tokens[:, :5]}
    with torch.no_grad():
        whole = model(tokens, **given)
    with torch.inference_mode():
        _, begun = model.step(tokens[:, :4], model.start(2, 9, **given))
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            y, state = model.step(tokens[:, 4:5], begun)
            after, _ = model.step(tokens[:, 5:], state)
        torch.testing.assert_close(torch.cat((y, after), 1).detach(), whole[:, 4:], atol=1e-9, rtol=1e-9)
    after.sum().backward()


def test_one_row_grows_after_a_step_with_gradients():
    """A single row may carry a stride that its memory does not have."""
    model, tokens = make("gpt2"), torch.randint(17, (1, 30))
    with torch.no_grad():
        _, state = model.step(tokens[:, :5], model.start(1, 100))
        state = state.copy()
    _, state = model.step(tokens[:, 5:6], state)
    with torch.no_grad():
        y, _ = model.step(tokens[:, 6:], state)
        torch.testing.assert_close(y, model(tokens)[:, 6:], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("sizes", [(6,), (1,) * 6, (2, 1, 3)])
def test_backward_hooks_and_hooks_on_all_modules_see_every_step(sizes):
    model, tokens, backward, forward = make("gpt2"), torch.randint(17, (2, 6)), [], []
    mixer = model.stack.layers[0].mixers[0]
    own = mixer.register_full_backward_hook(lambda module, into, out: backward.append(module))
    every = torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, y: forward.append(module) if module is mixer else None
    )
    try:
        state, parts = model.start(2, 6), []
        for size in sizes:
            y, state = model.step(tokens[:, sum(len(one[0]) for one in parts) :][:, :size], state)
            parts.append(y)
        torch.cat(parts, 1).sum().backward()
    finally:
        own.remove()
        every.remove()
    assert backward == forward == [mixer] * len(sizes)


def test_a_forward_that_takes_no_steps_is_refused():
    model, tokens = make("gpt2"), torch.randint(17, (2, 6))
    model.stack.layers[0].mixers[0].forward = lambda x, context: x
    with torch.no_grad(), pytest.raises(regard.UserError, match="takes no steps"):
        model.step(tokens[:, :1], model.start(2, 6))


@pytest.mark.parametrize("name", ["local", "mistral", "sparse-strided"])
def test_a_state_after_a_failed_step_is_refused(name):
    """Some layers have overwritten keys that it needs, and nothing tells which."""
    model = shallow(name).eval()
    tokens = torch.randint(61, (2, 260))
    with torch.no_grad():
        _, state = model.step(tokens[:, :150], model.start(2, 260))

        def fail(*given):
            raise KeyboardInterrupt

        hook = model.stack.layers[-1].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model.step(tokens[:, 150:250], state)
        hook.remove()
        with pytest.raises(UserError, match="its cache has dropped keys"):
            model.step(tokens[:, 150:151], state)


@pytest.mark.parametrize("copied", [State.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)),
                                    lambda s: join([s])])  # fmt: skip
def test_a_state_that_was_given_up_is_not_copied(copied):
    model = shallow("mistral").eval()
    with torch.no_grad():
        _, state = model.step(torch.randint(61, (2, 9)), model.start(2, 20))
        model.reorder(state, torch.tensor([1, 0]))
        with pytest.raises(UserError, match="was given up to `reorder`"):
            copied(state)


def test_an_older_state_after_a_shorter_way():
    """From S0 to S, on to 160, and from S again to 101: S0 has lost what the longer way wrote."""
    model = shallow("mistral").eval()
    tokens = torch.randint(61, (1, 260))
    with torch.no_grad():
        _, first = model.step(tokens[:, :50], model.start(1, 260))
        _, state = model.step(tokens[:, 50:100], first)
        for size in (60, 1):
            model.step(tokens[:, 100 : 100 + size], state)
        with pytest.raises(UserError, match="steps from it went on to 160"):
            model.step(tokens[:, 50:51], first)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "transformer"])
def test_a_layer_that_was_watched_between_reorders(name, fused):
    """It gathers its rows, and the others do not: from then on their tables differ."""
    model = shallow(name).eval().double()
    memory = model.encode(torch.randint(61, (4, 5))) if model.source_embed is not None else None
    stepper = Session(model) if fused else model
    tokens = torch.randint(61, (4, 1))
    watchers = model.stack.layers[0].branches["mixer"].attend.weights.watchers
    with torch.no_grad():
        y, state = stepper.step(tokens, model.start(4, 12, memory=memory))
        own = torch.arange(4)
        for turn in range(7):
            rows, new = torch.randint(4, (4,)), torch.randint(61, (4, 1))
            own, tokens = own[rows], torch.cat((tokens[rows], new), 1)
            state = model.reorder(state, rows)
            if turn == 3:
                watchers.append(lambda x: None)
            y, state = stepper.step(new, state)
            watchers.clear()
            whole = model(tokens, memory=None if memory is None else select(memory, own))
            assert float((y[:, 0] - whole[:, -1]).abs().max()) < 1e-9
