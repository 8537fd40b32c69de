"""Weights of eight bits: close to the floats, and as lawful."""

import copy

import pytest
import torch

from regard.core import UserError, build
from regard.core import recipe as recipes
from regard.kernels.int8 import Int8Head, Int8Linear, quantise


def made(name: str, *sets: str):
    recipe = recipes.load(name, None, ["model.width=48", "model.heads=4", "model.depth=2", "model.dropout=0", *sets])
    recipe["vocab"] = 61
    torch.manual_seed(3)
    return build(recipe).eval()


def test_a_map_is_close():
    torch.manual_seed(1)
    linear = torch.nn.Linear(256, 96)
    with torch.no_grad():
        linear.weight *= torch.rand(96, 1) * 9 + 0.1  # outputs of unlike sizes
    small = Int8Linear(linear.weight, linear.bias)
    x = torch.randn(5, 7, 256) * torch.rand(5, 7, 1) * 20
    wanted, found = linear(x), small(x)
    off = (wanted - found).detach().norm(dim=-1) / wanted.detach().norm(dim=-1)
    assert 0 < float(off.max()) < 0.05
    assert torch.equal(small.weight.sign()[linear.weight.abs() > 0.1], linear.weight.sign()[linear.weight.abs() > 0.1])
    assert not small.bias.requires_grad
    assert torch.equal(small(torch.zeros(1, 256)), linear.bias[None])


def test_a_position_does_not_depend_on_others():
    """Not even in the last bit, however large they are."""
    torch.manual_seed(2)
    small = Int8Linear(torch.randn(33, 64), None)
    x = torch.randn(9, 64)
    x[3] *= 1e4
    whole = small(x)
    for row in range(9):
        assert torch.equal(small(x[row : row + 1])[0], whole[row])


@pytest.mark.parametrize("name", ["gpt2", "llama", "transformer", "retnet", "rwkv4", "mqa"])
def test_the_law_holds(name):
    sets = ["model.layer.0.mixer.kv_heads=2"] if name == "llama" else []
    plain = made(name, *sets)
    model = quantise(copy.deepcopy(plain))
    assert any(isinstance(module, Int8Linear) for module in model.modules())
    assert isinstance(model.head, Int8Head)
    tokens = torch.randint(61, (3, 17))
    known = {"source": torch.randint(61, (3, 6))} if model.encoder is not None else {}
    with torch.no_grad():
        whole, wanted = model(tokens, **known), plain(tokens, **known)
        off = (whole - wanted).norm() / wanted.norm()
        assert 0 < float(off) < 0.1
        if not model.stack.streams:
            return
        state = model.start(3, 17, **known)
        found, begin = [], 0
        for end in (1, 2, 7, 12, 17):
            scores, state = model.step(tokens[:, begin:end], state)
            found.append(scores)
            begin = end
        assert torch.cat(found, 1) == pytest.approx(whole, abs=1e-4)
        alone = model(tokens[1:2], **{key: value[1:2] for key, value in known.items()})
        assert alone[0] == pytest.approx(whole[1], abs=1e-4)


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="float32 models on a cpu"):
        quantise(made("gpt2").half())
    with pytest.raises(UserError, match="two towers"):
        quantise(build(recipes.load("clip", "tiny") | {"vocab": 61}))
