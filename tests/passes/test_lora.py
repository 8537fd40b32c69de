"""LoRA: the model is unchanged at first, only adapters are trained, and merging gives a plain model."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard import UserError
from regard.cli import main
from regard.data import Tokenizer
from regard.ops.dispatch import is_plain_linear
from regard.passes.lora import Lora, LoraLinear, merge, merge_run

TEXTS = ["a cat sat on the mat", "the dog", "cat", "on the mat the dog sat and a cat sat"]
DECODER = {
    "vocab": 61,
    "model": {
        "kind": "decoder",
        "width": 24,
        "heads": 3,
        "depth": 2,
        "tie": "target",
        "layer": [
            {
                "mixer": {"part": "attention", "position": "rotary", "kv_heads": 1},
                "feedforward": {"part": "glu", "hidden": 38},
            }
        ],
    },
}


def decoder(*passes, **changes):
    torch.manual_seed(0)
    more = {"passes": list(passes)} if passes else {}
    return regard.build({**DECODER, "model": DECODER["model"] | more | changes})


def randomised(model):
    """Randomize the adapters, as if they were trained."""
    torch.manual_seed(3)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoraLinear):
                nn.init.normal_(module.up, std=0.3)
    return model


def tokens():
    return torch.randint(61, (3, 11), generator=torch.Generator().manual_seed(1))


def learning(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_the_same_at_first():
    plain, small = decoder(), decoder("lora")
    names = {name.rpartition(".")[2] for name in small.state_dict().keys() - plain.state_dict().keys()}
    assert names == {"down", "up"}
    assert all(torch.equal(small.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    with torch.no_grad():
        assert torch.equal(plain(tokens()), small(tokens()))


def test_where_it_goes():
    """Adapters are added to the named layers, and everything else is frozen."""
    every = {f"stack.layers.{i}.branches.{{}}.{kind}" for i in range(2) for kind in ("down", "up")}
    assert learning(decoder("lora")) == {name.format(f"mixer.{letter}") for name in every for letter in "qv"}
    model = decoder({"part": "lora", "on": "ko", "rank": 3})
    assert learning(model) == {name.format(f"mixer.{letter}") for name in every for letter in ("k", "out")}
    assert model.stack.layers[0].branches["mixer"].k.down.shape == (3, 24)
    assert model.stack.layers[0].branches["mixer"].k.up.shape == (8, 3)
    model = decoder({"part": "lora", "on": ["*.feedforward.out"], "learn": ["head.*", "stack.norm*"]}, tie="none")
    assert learning(model) == {name.format("feedforward.out") for name in every} | {"head.table"}
    shared = decoder("lora", share="layers")
    assert shared.stack.layers[0] is shared.stack.layers[1]
    assert len(learning(shared)) == 4


def test_it_is_what_the_equation_says():
    map_ = LoraLinear.from_linear(nn.Linear(13, 7), 3, 5.0, 0.0)
    nn.init.normal_(map_.up)
    x = torch.randn(2, 5, 13, requires_grad=True)
    y = map_(x)
    wanted = F.linear(x, map_.weight + 5 / 3 * map_.up @ map_.down, map_.bias)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    down = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, map_.down, map_.up), down, retain_graph=True)
    for one, two in zip(found, torch.autograd.grad(wanted, (x, map_.down, map_.up), down), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_dropout_is_of_the_small_map_alone():
    map_ = LoraLinear.from_linear(nn.Linear(13, 7), 3, 5.0, 0.5)
    x = torch.randn(4, 13)
    assert torch.equal(map_.train()(x), map_.eval()(x))
    nn.init.normal_(map_.up)
    assert not torch.equal(map_.train()(x), map_.eval()(x))


def test_it_learns_and_the_rest_stays():
    model = decoder({"part": "lora", "rank": 4, "alpha": 8.0, "on": "qkvo"})
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.02)
    losses = []
    for _ in range(25):
        loss = F.cross_entropy(model(tokens()[:, :-1]).flatten(0, 1), tokens()[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == learning(model)


@pytest.mark.parametrize("on", ["qv", "qkvo", ["*.feedforward.*"]])
def test_merged_is_plain_and_the_same(on):
    model = randomised(decoder({"part": "lora", "rank": 5, "alpha": 3.0, "on": on}))
    with torch.no_grad():
        y = model(tokens())
        assert not torch.allclose(y, decoder()(tokens()), atol=1e-3)
        merged = merge(model)
        torch.testing.assert_close(merged(tokens()), y, rtol=1e-5, atol=1e-5)
    assert all(is_plain_linear(m) for m in merged.modules() if isinstance(m, nn.Linear))
    assert merged.state_dict().keys() == decoder().state_dict().keys()
    assert all(p.requires_grad for p in merged.parameters())
    assert merged.head.table is merged.embed.table
    assert "passes" not in merged.recipe["model"]
    with pytest.raises(UserError, match="nothing to merge"):
        merge(merged)


def test_steps_are_the_same_as_the_whole():
    model = randomised(decoder("lora")).double().eval()
    with torch.no_grad():
        whole, state = model(tokens()), model.start(3, 11)
        some = []
        for begin, end in ((0, 4), (4, 5), (5, 11)):
            y, state = model.step(tokens()[:, begin:end], state)
            some.append(y)
    torch.testing.assert_close(torch.cat(some, 1), whole)


def test_a_pass_over_a_model_of_ones_own():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    y = model(x)
    Lora(rank=2, on=["0", "2"])(model)
    assert torch.equal(model(x), y)
    assert learning(model) == {"0.down", "0.up", "2.down", "2.up"}
    assert model[0].down.dtype == torch.float64


@pytest.fixture
def run(tmp_path):
    """A run folder with a small model that has learned a little."""
    words = Tokenizer.train("words", TEXTS)
    model = randomised(regard.build({**DECODER, "vocab": words.size, "model": DECODER["model"] | {"passes": ["lora"]}}))
    regard.save(model, tmp_path / "run")
    words.save(tmp_path / "run" / "tokenizer.json")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"documents": True, "tokenizers": [words.hash()] * 2}))
    return tmp_path / "run"


def test_a_merged_run(run, tmp_path, capsys):
    assert main(["merge", str(run), str(tmp_path / "plain")]) == 0
    assert "a plain model" in capsys.readouterr().out
    one, two = regard.load(run), regard.load(tmp_path / "plain")
    given = torch.randint(one.model.vocab, (3, 11))
    with torch.no_grad():
        torch.testing.assert_close(one.model(given), two.model(given), rtol=1e-5, atol=1e-5)
    assert [p.text for (p,) in one.predict(TEXTS)] == [p.text for (p,) in two.predict(TEXTS)]
    assert "lora" not in (tmp_path / "plain" / "recipe.toml").read_text()


def test_refusals(run, tmp_path, capsys):
    merge_run(run, tmp_path / "plain")
    for given, sentence in (
        ((run, tmp_path / "plain"), "is there already"),
        ((tmp_path / "plain", tmp_path / "again"), "plain: this model has no adapters"),
        ((tmp_path / "nothing", tmp_path / "again"), "holds no recipe.toml"),
    ):
        with pytest.raises(UserError, match=sentence):
            merge_run(*given)
        assert not (tmp_path / "again").exists()
    assert main(["merge", str(tmp_path / "plain"), str(tmp_path / "again")]) == 2
    assert "nothing to merge" in capsys.readouterr().err
    for one, sentence in (
        ({"rank": 0}, r"passes\[0\]: rank must be at least 1"),
        ({"on": "qx"}, r"passes\[0\]: on takes letters of 'qkvo'"),
        ({"on": ["*.nothing"]}, r"passes\[0\]: there is no linear layer to adapt"),
        ({"dropout": 1.5}, r"lora.dropout must be at least 0"),
        ({"rang": 3}, r"lora has no 'rang'; did you mean 'rank'"),
    ):
        with pytest.raises(UserError, match=sentence):
            decoder({"part": "lora", **one})
