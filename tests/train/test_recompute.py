"""Gradient checkpointing: less is kept, and every gradient, random number and running statistic is the same."""

import pytest
import torch

import regard
from regard.core import Layer, Stack, losses
from regard.files import recipe as recipes

SMALL = {
    "model": {"width": 12, "heads": 3, "depth": 3, "dropout": 0.3},
    "attention": {"part": "attention", "pattern": "causal"},
    "mlp": {"part": "mlp", "hidden": 10},
}
LAYERS = {
    "pre": {"mixer": SMALL["attention"], "feedforward": SMALL["mlp"], "wiring": "pre"},
    "batch": {"mixer": SMALL["attention"], "wiring": {"part": "pre", "norm": "batch"}},
    "power": {"feedforward": SMALL["mlp"], "wiring": {"part": "pre", "norm": {"part": "power", "warmup": 1}}},
    "residual": {"mixer": SMALL["attention"], "feedforward": SMALL["mlp"], "wiring": "residual"},
    "reversible": {"mixer": SMALL["attention"], "feedforward": SMALL["mlp"], "wiring": "reversible"},
    "lstm": {"mixer": "lstm", "wiring": "pre"},
    "experts": {"feedforward": {"part": "experts", "experts": 3, "expert": SMALL["mlp"]}, "wiring": "pre"},
    "shared layers": {"mixer": SMALL["attention"], "wiring": {"part": "pre", "norm": "batch"}},
    "shared position": {"mixer": SMALL["attention"] | {"position": "shared"}, "wiring": "pre"},
}


def decoder(name):
    torch.manual_seed(0)
    extra = {"shared position": {"position": "t5"}, "shared layers": {"share": "layers"}}.get(name, {})
    return regard.build({"vocab": 11, "model": {"kind": "decoder", **SMALL["model"], **extra, "layer": [LAYERS[name]]}})


def encoder_decoder(name):
    torch.manual_seed(0)
    recipe = recipes.load(name, "tiny")
    if name == "transformer":
        recipe["model"] |= {"width": 12, "heads": 3, "depth": 2}
    return regard.build(recipe, vocab=11)


def learned(model, recompute):
    """Gradients, buffers, the next random number, and how often a layer ran, after two steps."""
    for module in model.modules():
        if isinstance(module, Stack):
            module.gradient_checkpointing = recompute
    calls = []
    for module in model.modules():
        if isinstance(module, Layer):
            for mixer in module.mixers:
                mixer.register_forward_pre_hook(lambda *_: calls.append(1))  # a second run ends inside the last one
    rng = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(2):
        tokens = torch.randint(11, (2, 7), generator=rng)
        valid = torch.arange(7) < torch.tensor([[7], [4]])
        source = {} if model.encoder is None else {"source": tokens[:, :5], "source_valid": valid[:, :5]}
        with losses(model) as more:
            (model(tokens, valid, **source)[valid].square().mean() + more()).backward()
    found = {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": b for name, b in model.named_buffers()}
    return found | {"random": torch.rand(3)}, len(calls)


@pytest.mark.parametrize("name", LAYERS)
def test_decoder(name):
    same(lambda: decoder(name), often=name != "reversible")


@pytest.mark.parametrize("name", ["transformer", "seq2seq-bahdanau", "conv-seq2seq"])
def test_encoder_decoder(name):
    """Finals that an encoder hands to its decoder included."""
    same(lambda: encoder_decoder(name), often=name != "seq2seq-bahdanau")


def same(make, often):
    plain, once = learned(make(), False)
    again, twice = learned(make(), True)
    assert plain.keys() == again.keys()
    for name in plain:
        assert torch.equal(plain[name], again[name]), name
    if often:
        assert twice == 2 * once, "every layer was computed twice"


def kept(run):
    """Numbers that something keeps for the backward."""
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(torch.randint(11, (2, 7)))
    return total


def test_less_is_kept_by_an_encoder_that_hands_on_its_states():
    plain, again = encoder_decoder("seq2seq-bahdanau"), encoder_decoder("seq2seq-bahdanau")
    again.encoder.gradient_checkpointing = True
    assert kept(again.encode) < 0.4 * kept(plain.encode)


def test_less_is_kept():
    plain, again = decoder("pre"), decoder("pre")
    again.stack.gradient_checkpointing = True
    assert kept(again) < 0.4 * kept(plain)
    again.eval()
    assert kept(again) == kept(plain.eval()), "only in training"
