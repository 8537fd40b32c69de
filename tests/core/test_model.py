"""What a model refuses, and how its states share buffers."""

import pytest
import torch

import regard
from regard.core import recipe as recipes


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
    with pytest.raises(regard.UserError, match="not from NoneType"):
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
