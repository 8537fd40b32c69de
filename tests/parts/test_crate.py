"""CRATE: its layer as the optimization steps of the paper, its measured rates, and images as patches."""

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.core import Context, Embed, Mixer, UserError, part
from regard.look import rate
from regard.parts.embeds.patches import Patches
from regard.parts.feedforwards.ista import Ista
from regard.parts.mixers.attention import Attention
from regard.parts.mixers.subspace import Subspace
from regard.verify.laws import max_difference


def test_ista_is_a_step_down_its_objective():
    torch.manual_seed(0)
    step = Ista(7, step=0.3, sparsity=0.2).double()
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    y = x.clone().requires_grad_()
    (0.5 * (x - y @ step.dictionary.T.detach()).square().sum()).backward()
    want = F.relu(x - 0.3 * y.grad - 0.3 * 0.2)
    assert max_difference(step(x, Context.begin(2, 5)).detach(), want) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("dim", [None, 5])
def test_subspaces_are_attention_with_one_map(dim):
    torch.manual_seed(0)
    one = Subspace(12, 3, dim=dim, pattern="everything").double()
    three = Attention(12, 3, dim=dim, pattern="everything", bias="o").double()
    own = {f"{letter}.weight": one.into.weight for letter in "qkv"}
    three.load_state_dict(own | {f"out.{kind}": getattr(one.attention.out, kind) for kind in ("weight", "bias")})
    x, context = torch.randn(2, 9, 12, dtype=torch.float64), Context.begin(2, 9)
    assert max_difference(one(x, context), three(x, context)) < 1e-12
    assert one.cost(9).flops < three.cost(9).flops


def test_rate_is_what_it_says():
    """Zeros cost nothing; otherwise half the logs of 1 + scaled eigenvalues; padding is not counted."""
    torch.manual_seed(0)
    z = torch.randn(2, 9, 5, dtype=torch.float64)
    valid = torch.arange(9)[None] < torch.tensor([9, 4])[:, None]
    assert rate.rate(torch.zeros_like(z)).abs().max() == 0
    for row, length in enumerate((9, 4)):
        values = torch.linalg.eigvalsh(z[row, :length].T @ z[row, :length])
        want = 0.5 * torch.log1p(5 / (length * 0.3**2) * values).sum()
        assert float(rate.rate(z, valid, 0.3)[row]) == pytest.approx(float(want))


def test_rates_of_every_layer():
    torch.manual_seed(0)
    model = regard.build("crate", size="tiny", vocab=11, overrides=["model.width=24", "model.heads=3"]).eval()
    tokens = torch.randint(11, (2, 13))
    valid = torch.arange(13)[None] < torch.tensor([13, 6])[:, None]
    rates = rate.layer_rates(model, tokens, valid)
    assert len(rates) == 4
    assert all(r.subspace_rate > 0 and r.vector_rate > 0 and 0 < r.density < 1 for r in rates)
    noisy = torch.where(valid, tokens, torch.randint(11, (2, 13)))
    for one, two in zip(rates, rate.layer_rates(model, noisy, valid), strict=True):
        assert one == pytest.approx(two, rel=1e-5)
    alone = rate.layer_rates(model, tokens[1:, :6])
    pair = [rate.layer_rates(model, tokens[:1]), alone]
    for one, two, both in zip(*pair, rates, strict=True):
        assert (one.subspace_rate + two.subspace_rate) / 2 == pytest.approx(both.subspace_rate, rel=1e-4)
    other = regard.build("transformer-encoder", size="tiny", vocab=11)
    with pytest.raises(UserError, match="no layer with subspaces"):
        rate.layer_rates(other, tokens)


def test_wider_subspaces_cost_more():
    """The rates of a layer are measured in the subspaces of that layer."""
    torch.manual_seed(0)
    model = regard.build("crate", size="tiny", vocab=11, overrides=["model.width=24", "model.heads=3"]).eval()
    tokens = torch.randint(11, (2, 13))
    before = rate.layer_rates(model, tokens)
    with torch.no_grad():
        model.stack.layers[3].branches["mixer"].into.weight.mul_(3)
    after = rate.layer_rates(model, tokens)
    assert [r.subspace_rate for r in after[:3]] == [r.subspace_rate for r in before[:3]]
    assert after[3].subspace_rate > before[3].subspace_rate


@torch.no_grad()
def test_patches_are_a_convolution():
    torch.manual_seed(0)
    embed = Patches(10, [6, 9], 3, channels=2, position="none").double()
    images = torch.randn(2, 2, 6, 9, dtype=torch.float64)
    x = embed(images, Context.begin(*embed.extent(images)))
    weight = embed.into.weight.view(10, 2, 3, 3)
    want = F.conv2d(images, weight, embed.into.bias, stride=3).flatten(2).mT
    assert x.shape == (2, 7, 10)
    assert max_difference(x[:, 1:], want) < 1e-12
    assert torch.equal(x[:, 0], embed.token.expand(2, 10))
    cut = embed.cut(images)
    assert torch.equal(embed(cut, Context.begin(2, 7)), x)


def test_images_go_through_a_model():
    embed = {"part": "patches", "image": 8, "patch": 4, "channels": 1}
    head = {"part": "classify", "classes": 5, "pool": "first"}
    model = regard.build("crate", size="tiny", vocab=1, overrides=["model.depth=1"])
    table = model.recipe["model"] | {"embed": embed, "head": head}
    model = regard.build({"model": table}, vocab=1)
    assert model(torch.randn(3, 1, 8, 8)).shape == (3, 5)
    with pytest.raises(UserError, match=r"images must be numbers of shape \(batch, 1, 8, 8\)"):
        model(torch.randn(3, 1, 8, 9))


@pytest.mark.parametrize(
    ("contract", "spec", "sentence"),
    [
        (Mixer, {"part": "ista", "step": 0.0}, "step must be above 0"),
        (Mixer, {"part": "subspace", "heads": 5}, "width 24 is not divisible by 5 heads"),
        (Embed, {"part": "patches", "image": 9, "patch": 2}, "that a patch divides"),
        (Embed, {"part": "patches", "image": [8], "patch": 2}, "height and width"),
    ],
)
def test_bad_arguments(contract, spec, sentence):
    with pytest.raises(UserError, match=sentence):
        part(contract, spec, width=24, heads=3, vocab=5)
