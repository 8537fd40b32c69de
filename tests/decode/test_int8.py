"""Weights of eight bits: close to the floats, and as lawful."""

import copy

import pytest
import torch

from regard.core import UserError, build
from regard.decode.int8 import Int8Head, Int8Linear, quantize
from regard.files import recipe as recipes
from regard.verify import laws
from tests.models import shallow

OTHERS = ("gat", "gatv2", "bitnet", "fasttext")  # without a plain linear map
NAMES = [name for name in recipes.names() if recipes.load(name)["model"]["kind"] != "towers" and name not in OTHERS]


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


@pytest.mark.parametrize("name", NAMES)
def test_the_laws_hold(name):
    """Of every recipe, what is not in eight bits in float64: then no noise moves a number from one step of a rounding
    to the next, and equal is equal."""
    torch.manual_seed(3)
    plain = shallow(name).eval()
    with torch.no_grad():
        for parameter in plain.parameters():  # so that no bias and no gate is as it was born
            parameter += 0.02 * torch.randn_like(parameter)
    model = quantize(copy.deepcopy(plain))
    assert any(isinstance(module, Int8Linear) for module in model.modules())
    given = model.random_inputs(3, 17)
    with torch.no_grad():
        wanted = plain(**given)
        assert 0 < (model(**given) - wanted).norm() / wanted.norm() < 0.2
    subject = laws.Subject(model)
    for law in (laws.alone, *((laws.cuts, laws.selects, laws.reorders, laws.joins) if subject.streams else ())):
        finding = law(subject)
        assert finding.holds, f"{finding.law}: {finding.worst:.2e} > {finding.limit:.0e}"


def test_the_head_as_well():
    assert isinstance(quantize(made("gpt2")).head, Int8Head)


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="float32 models on a cpu"):
        quantize(made("gpt2").half())
    with pytest.raises(UserError, match="two towers"):
        quantize(build(recipes.load("clip", "tiny") | {"vocab": 61}))
