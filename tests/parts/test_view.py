"""Multi-view decoding: which encoder layer each decoder layer attends to."""

import pytest
import torch

import regard
from regard.core import Context, Memory, Mixer, Model, Place, UserError, part, watch
from regard.verify import laws

CROSS = {"part": "attention", "over": "memory"}


def view(of, index=0, encoder=3, decoder=3) -> Mixer:
    place = Place("decoder", encoder, decoder, 24, index=index)
    return part(Mixer, {"part": "view", "of": of, "mixer": CROSS}, width=24, heads=3, place=place)


@pytest.mark.parametrize(
    ("of", "encoder", "decoder", "want"),
    [
        ("aligned", 3, 3, [0, 1, 2]),
        ("reversed", 3, 3, [2, 1, 0]),
        ("last", 3, 3, [2, 2, 2]),
        ("aligned", 6, 3, [1, 3, 5]),
        ("reversed", 6, 3, [5, 3, 1]),
        ("aligned", 2, 5, [0, 0, 1, 1, 1]),
        ("reversed", 2, 5, [1, 1, 1, 0, 0]),
        (0, 4, 2, [0, 0]),
        (-2, 4, 2, [2, 2]),
    ],
)
def test_which_layer(of, encoder, decoder, want):
    assert [view(of, index, encoder, decoder).layer for index in range(decoder)] == want


def make(of, depth=3, norm="none") -> Model:
    torch.manual_seed(0)
    overrides = [f"model.decoder.layer.0.cross.of={of}", f"model.depth={depth}", f"model.encoder.norm={norm}"]
    return regard.build("multi-view", size="tiny", vocab=17, overrides=overrides).double().eval()


@pytest.mark.parametrize("norm", ["none", "layer"])
def test_views_are_what_the_encoder_gives_when_it_ends_there(norm):
    model = make("reversed", norm=norm)
    source = torch.randint(17, (2, 11))
    with torch.no_grad(), watch(model, "encoder.layers.*.out") as seen:
        memory = model.encode(source)
    assert torch.equal(memory.layer_outputs[-1], memory.x)
    for index, found in enumerate(memory.layer_outputs):
        raw = seen[f"encoder.layers.{index}.out"][0]
        assert torch.equal(found, raw if norm == "none" else model.encoder.norm(raw))


def test_who_does_not_choose_gets_no_views():
    model = regard.build("transformer", size="tiny", vocab=17)
    assert model.encode(torch.randint(17, (2, 11))).layer_outputs == ()


def test_only_the_chosen_layer_matters():
    """All decoder layers attend to the first encoder layer, so the second has no effect."""
    model = make(0, depth=2)
    source, target = torch.randint(17, (2, 11)), torch.randint(17, (2, 7))
    with torch.no_grad():
        before = model(target, source=source)
        for weight in model.encoder.layers[1].parameters():
            weight.add_(1.0)
        assert torch.equal(model(target, source=source), before)
        for weight in model.encoder.layers[0].parameters():
            weight.mul_(1.5)
        assert laws.max_difference(model(target, source=source), before) > 1e-3


def test_every_layer_of_the_encoder_learns():
    model = make("reversed")
    model(torch.randint(17, (2, 7)), source=torch.randint(17, (2, 11))).square().sum().backward()
    for layer in model.encoder.layers:
        assert all(float(weight.grad.abs().max()) > 0 for weight in layer.branches["mixer"].v.parameters())


def test_bad_arguments():
    with pytest.raises(UserError, match="of = 3 is no layer of an encoder with 3"):
        view(3)
    with pytest.raises(UserError, match="did you mean 'aligned'"):
        view("alined")
    with pytest.raises(UserError, match="needs an encoder"):
        part(Mixer, {"part": "view", "mixer": CROSS}, width=24, heads=3, place=Place())
    one, x = view("last"), torch.randn(2, 5, 24)
    for memory in (None, Memory(torch.randn(2, 7, 24))):
        with pytest.raises(UserError, match="a view of encoder layer 2 needs a memory with the outputs of all layers"):
            one(x, Context.begin(2, 5, memory=memory))
