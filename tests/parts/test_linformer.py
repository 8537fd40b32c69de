"""Linformer against its formula, and what it refuses."""

import pytest
import torch

import regard
from regard.core import Context, Mixer, UserError, part
from regard.look import sketch
from regard.verify import laws

WIDTH, HEADS, LENGTH, RANK = 24, 3, 13, 5


def make(**given):
    torch.manual_seed(1)
    spec = {"part": "linformer", "length": LENGTH, "rank": RANK, **given}
    return part(Mixer, spec, width=WIDTH, heads=HEADS).double().eval()


def model(share="kv", kind="encoder", **head):
    layer = {"mixer": {"part": "linformer", "length": LENGTH, "rank": RANK, "share": share}, "wiring": "pre"}
    table = {"kind": kind, "width": WIDTH, "heads": HEADS, "depth": 3, "layer": [layer], **head}
    return regard.build({"vocab": 17, "model": table})


@pytest.mark.parametrize("share", ["none", "heads", "kv"])
@pytest.mark.parametrize("time", [LENGTH, 7, 1])
@torch.no_grad()
def test_formula(share, time):
    """A short sequence uses the first rows of E and F."""
    mixer = make(share=share)
    x = torch.randn(2, time, WIDTH, dtype=torch.float64)
    q, k, v = (m(x).unflatten(-1, (HEADS, -1)) for m in (mixer.q, mixer.k, mixer.v))
    heads = []
    for head in range(HEADS):
        down_k, down_v = (t[head if share == "none" else 0, :time] for t in (mixer.down_k, mixer.down_v))
        keys, values = down_k.T @ k[:, :, head], down_v.T @ v[:, :, head]
        heads.append((q[:, :, head] @ keys.mT / 8**0.5).softmax(-1) @ values)
    want = mixer.out(torch.cat(heads, -1))
    assert laws.max_difference(mixer(x, Context.begin(2, time)), want) < 1e-12


def test_what_is_shared():
    each = LENGTH * RANK
    sizes = {share: sum(p.numel() for n, p in model(share).named_parameters() if "down" in n) for share in
             ("none", "heads", "kv", "layers")}  # fmt: skip
    assert sizes == {"none": 3 * 2 * HEADS * each, "heads": 3 * 2 * each, "kv": 3 * each, "layers": each}


def test_one_projection_for_all_layers(tmp_path):
    one = model("layers").eval()
    first, *others = (layer.branches["mixer"].down_k for layer in one.stack.layers)
    assert all(other is first for other in others)
    regard.save(one, tmp_path)
    again = regard.restore(tmp_path).eval()
    tokens = torch.randint(17, (2, 9))
    assert torch.equal(one(tokens), again(tokens))
    assert len({id(layer.branches["mixer"].down_k) for layer in again.stack.layers}) == 1
    assert sketch.parameters_of_recipe(one.recipe) == sum(p.numel() for p in one.parameters())


def test_two_stacks_share_nothing():
    side = {"depth": 2, "layer": [{"mixer": {"part": "linformer", "length": 9, "rank": 4, "share": "layers"}}]}
    one, two = (regard.core.Stack(width=WIDTH, heads=HEADS, **side) for _ in range(2))
    assert one.layers[0].branches["mixer"].down_k is not two.layers[0].branches["mixer"].down_k


def test_a_longer_sequence_is_refused():
    mixer, whole = make(), model()
    with pytest.raises(UserError, match="has 13 positions, and the input 14"):
        mixer(torch.randn(2, 14, WIDTH, dtype=torch.float64), Context.begin(2, 14))
    assert whole.limit == LENGTH
    with pytest.raises(UserError, match="a sequence of 14 is longer than this model's 13 positions"):
        whole(torch.zeros(2, 14, dtype=torch.long))


def test_a_decoder_is_refused_by_name():
    with pytest.raises(UserError, match=r"layer\[0\].mixer: .*'linformer', as it is made here, looks ahead"):
        model(kind="decoder")
    with pytest.raises(UserError, match="does not step"):
        make().start(Context.begin(2, 0), 5)
    with pytest.raises(UserError, match="cannot follow a pattern"):
        model()(torch.zeros(2, 9, dtype=torch.long), pattern="causal")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_rows_of_padding(dtype):
    mixer = make().to(dtype)
    x = torch.randn(3, 7, WIDTH, dtype=dtype, requires_grad=True)
    valid = torch.arange(7)[None] < torch.tensor([[7], [0], [3]])
    y = mixer(x, Context.begin(3, 7, valid=valid))
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert bool(torch.isfinite(y).all())
    assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rank": 14}, "between 1 and the length"),
        ({"rank": 0}, "between 1"),
        ({"share": "head"}, "did you mean 'heads'"),
    ],
)
def test_bad_arguments(given, sentence):
    with pytest.raises(UserError, match=sentence):
        make(**given)
