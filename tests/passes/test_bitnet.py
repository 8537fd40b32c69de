"""BitNet: quantization, gradients through it, and packed weights that give exactly the same outputs."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard import UserError
from regard.cli import main
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.ops.dispatch import is_plain_linear
from regard.passes import bitnet
from regard.passes.bitnet import BitLinear, PackedLinear, pack, pack_ternary, unpack_ternary

TEXTS = ["a cat sat on the mat", "the dog", "cat", "on the mat the dog sat and a cat sat"]
DECODER = {
    "vocab": 61,
    "model": {
        "kind": "decoder",
        "width": 24,
        "heads": 3,
        "depth": 2,
        "layer": [{"mixer": {"part": "attention", "position": "rotary"}, "feedforward": {"part": "glu", "hidden": 38}}],
        "passes": ["bitnet"],
    },
}


def decoder(**changes):
    torch.manual_seed(0)
    return regard.build({**DECODER, "model": DECODER["model"] | changes})


def random_map(wide=13, to=7, bias=True, norm="none"):
    torch.manual_seed(wide)
    made = BitLinear(wide, to, bias, norm)
    nn.init.normal_(made.weight)
    return made


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("wide", "to", "bias", "norm"), [(13, 7, True, "none"), (16, 9, False, "rms"), (1, 1, True, "none")]
)
def test_packed_is_the_very_same(dtype, wide, to, bias, norm, monkeypatch):
    monkeypatch.setattr(bitnet, "UNPACK_BLOCK", 4 * wide)  # one packed row at a time
    map_ = random_map(wide, to, bias, norm).to(dtype).eval()
    x = 3 * torch.randn(2, 5, wide, dtype=dtype)
    x[0, 2] = 0
    with torch.no_grad():
        y = map_(x)
        assert y.dtype == dtype
        assert y.isfinite().all()
        assert torch.equal(PackedLinear.from_bit_linear(map_).eval()(x), y)


def test_sums_stay_exact_when_there_are_very_many():
    """More terms than float32 can add without rounding at every step."""
    wide = 600_001
    map_ = random_map(wide, 3).eval()
    x = torch.rand(2, wide) + 0.5
    with torch.no_grad():
        map_.weight.abs_()
        y = map_(x)
        assert torch.equal(PackedLinear.from_bit_linear(map_).eval()(x), y)
        weights, size = map_.ternary()
        quanta, step = bitnet.quantize_input(x)
        whole = quanta.long() @ weights.long().T
        assert whole.min() > 1 << 24
        assert torch.equal(y, bitnet.dequantize(whole.double(), step, size, map_.bias, x.dtype))


def test_what_is_rounded_and_how_it_learns():
    """Weights have three values and inputs 255; gradients pass straight through the rounding."""
    map_ = random_map().double()
    x = torch.randn(4, 13, dtype=torch.float64, requires_grad=True)
    y = map_(x)
    size = map_.weight.detach().abs().mean()
    weight = (map_.weight.detach() / size).round().clamp(-1, 1) * size
    most = x.detach().abs().amax(1, keepdim=True)
    near = (x.detach() * 127 / most).round() * most / 127
    assert (near - x.detach()).abs().max() > 1e-4
    assert torch.allclose(y, F.linear(near, weight, map_.bias))
    down = torch.randn_like(y)
    y.backward(down)
    assert torch.allclose(x.grad, down @ weight)
    assert torch.allclose(map_.weight.grad, down.T @ near)
    assert torch.allclose(map_.bias.grad, down.sum(0))


def test_bytes():
    weights = torch.randint(-1, 2, (7, 5), generator=torch.Generator().manual_seed(0))
    held = pack_ternary(weights)
    assert held.dtype == torch.uint8
    assert held.shape == (2, 5)
    assert torch.equal(unpack_ternary(held, torch.int8).flatten(0, 1)[:7] - 1, weights.to(torch.int8))
    map_ = random_map()
    assert torch.equal(PackedLinear.from_bit_linear(map_).weight, map_.ternary()[0] * map_.ternary()[1])


def test_where_it_goes():
    """Layers are replaced, tables and heads are not; shared layers stay shared; others may be kept."""
    model = decoder(tie="none", head={"part": "tag", "classes": 5}, share="layers")
    maps = {path: m for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    assert is_plain_linear(maps.pop("head.out"))
    assert len(maps) == 14
    assert all(type(m) is BitLinear for m in maps.values())
    assert model.stack.layers[0] is model.stack.layers[1]
    model = decoder(passes=[{"part": "bitnet", "keep": ["*.feedforward.*", "head*"], "norm": "rms"}])
    layer = model.stack.layers[1].branches
    assert is_plain_linear(layer["feedforward"].out)
    assert layer["mixer"].q.norm.inner.weight.shape == (24,)


def test_it_learns():
    model = decoder()
    tokens = torch.randint(61, (4, 12), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    before = {name: p.clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.fixture
def run(tmp_path):
    """A run folder with a small model whose layers outweigh its tables."""
    words = Tokenizer.train("words", TEXTS)
    torch.manual_seed(0)
    model = regard.build("bitnet", size="tiny", vocab=words.size, overrides=["model.depth=1"])
    regard.save(model, tmp_path / "run")
    words.save(tmp_path / "run" / "tokenizer.json")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"documents": True, "tokenizers": [words.hash()] * 2}))
    return tmp_path / "run"


def held(model) -> int:
    """Bytes of a model in memory, each tensor once."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def test_a_packed_run(run, tmp_path, capsys):
    assert main(["pack", str(run), str(tmp_path / "small")]) == 0
    assert "times smaller" in capsys.readouterr().out
    one, two = regard.load(run), regard.load(tmp_path / "small")
    tokens = torch.randint(one.model.vocab, (3, 11))
    with torch.no_grad():
        assert torch.equal(one.model(tokens), two.model(tokens))
    config = DecodeConfig(max_new_tokens=7)
    assert two.predict(TEXTS, config) == one.predict(TEXTS, config)
    files = [(folder / "model.safetensors").stat().st_size for folder in (run, tmp_path / "small")]
    assert files[0] > 6 * files[1]
    assert held(one.model) > 6 * held(two.model)
    said = (one.model.cost(5, 3), two.model.cost(5, 3))
    assert said[0] == said[1]
    with pytest.raises(UserError, match=r"packed weights cannot be trained"):
        two.model.train()(tokens)


def test_the_rest_in_fewer_bits(run, tmp_path):
    pack(run, tmp_path / "full")
    pack(run, tmp_path / "half", rest="bfloat16")
    full, half = regard.load(tmp_path / "full"), regard.load(tmp_path / "half")
    assert held(half.model) < held(full.model)
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    assert half.predict(TEXTS[:1], DecodeConfig(max_new_tokens=3))[0][0].tokens


def test_refusals(run, tmp_path, capsys):
    pack(run, tmp_path / "small")
    for given, sentence in (
        ((run, tmp_path / "small"), "is there already"),
        ((tmp_path / "small", tmp_path / "again"), "is packed already"),
        ((tmp_path / "nothing", tmp_path / "again"), "holds no recipe.toml"),
        ((run, tmp_path / "again", "int3"), "rest 'int3' is unknown"),
    ):
        with pytest.raises(UserError, match=sentence):
            pack(*given)
        assert not (tmp_path / "again").exists()
    regard.save(decoder(passes=[]), tmp_path / "plain")
    assert main(["pack", str(tmp_path / "plain"), str(tmp_path / "again")]) == 2
    assert "was not trained with the pass 'bitnet'" in capsys.readouterr().err
    for passes, sentence in (
        (["bitnt"], r"passes\[0\]: unknown pass 'bitnt'; did you mean 'bitnet'"),
        ([{"part": "bitnet", "keep": ["*"]}], r"passes\[0\]: there is no linear layer to replace"),
        ([{"part": "bitnet", "rest": "float16"}], r"passes\[0\]: rest is for packed models"),
        ([{"part": "bitnet", "bits": 2}], r"bitnet has no 'bits'"),
    ):
        with pytest.raises(UserError, match=sentence):
            decoder(passes=passes)


def test_a_pass_of_ones_own(tmp_path, monkeypatch):
    """Passes are found like parts, applied in order, and their arguments are checked."""
    (tmp_path / "halve.py").write_text(
        "from regard.core import Pass\n\n\nclass Halve(Pass):\n    def __init__(self, times: int = 1):\n"
        "        self.times = times\n\n    def __call__(self, model):\n        for p in model.parameters():\n"
        "            p.data.mul_(0.5**self.times)\n"
    )
    monkeypatch.setattr("regard.schema.user_folders", [])
    regard.add_folder(tmp_path)
    plain, halved = decoder(), decoder(passes=["bitnet", {"part": "halve", "times": 2}])
    for one, two in zip(plain.parameters(), halved.parameters(), strict=True):
        assert torch.equal(one / 4, two)
    with pytest.raises(UserError, match=r"passes\[0\]: halve has no 'time'; did you mean 'times'"):
        decoder(passes=[{"part": "halve", "time": 2}])
