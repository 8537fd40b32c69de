"""One cache for a whole stack, and gated retention below it."""

import pytest
import torch

from regard.core import Context, Mixer, Pattern, UserError, part, state_bytes

LAYER = {"feedforward": {"part": "mlp", "hidden": 10}, "wiring": "pre"}
WINDOW = {"mixer": {"part": "attention", "pattern": "causal & window(4)"}, **LAYER}


def make(depth: int = 2, first: dict | None = None, **given) -> Mixer:
    torch.manual_seed(0)
    spec = {"part": "yoco", "first": first or {"layer": [WINDOW]}, "second": {"depth": depth, "layer": [LAYER]}}
    return part(Mixer, {**spec, "kv_heads": 1, **given}, width=24, heads=3).double()


def bytes_of(mixer: Mixer, capacity: int) -> int:
    return state_bytes(mixer.start(Context.begin(1, 0), capacity))


@pytest.mark.parametrize("first", [None, {"layer": [{"mixer": "gated_retention", **LAYER}], "depth": 2}])
def test_the_cache_exists_once(first):
    """Whatever the depth, a position adds one key and one value."""
    for depth in (1, 5):
        mixer = make(depth, first)
        assert bytes_of(mixer, 1000) - bytes_of(mixer, 900) == 100 * 2 * 8 * 8  # two of one head of 8 doubles
        assert bytes_of(mixer, 1000) == mixer.cost(1, 999).state
    many = part(Mixer, {"part": "attention", "kv_heads": 1}, width=24, heads=3).double()
    assert bytes_of(many, 1000) - bytes_of(many, 900) > 100 * 2 * 8 * 8


@torch.no_grad()
def test_all_layers_look_at_the_same_keys():
    """As plain attention whose keys come from the first stack's output, written out."""
    mixer, x = make(position="none"), torch.randn(2, 9, 24).double()
    context = Context.begin(2, 9)
    h = mixer.first(x, context)
    k, v = mixer.k(mixer.norm(h)), mixer.v(mixer.norm(h))  # one head of 8
    for layer in mixer.second.layers:
        look = layer.branches["mixer"].attention
        q = look.q(layer.wiring.norms[0](h)).unflatten(-1, (3, 8)).transpose(1, 2)
        scores = (q @ k[:, None].mT / 8**0.5).masked_fill(~torch.ones(9, 9).bool().tril(), -torch.inf)
        h = h + look.out((scores.softmax(-1) @ v[:, None]).transpose(1, 2).flatten(-2))
        h = h + layer.branches["feedforward"](layer.wiring.norms[1](h), context)
    torch.testing.assert_close(mixer(x, context), h, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_pattern_given_with_the_batch():
    """A pattern of the batch also applies to the second stack: documents do not see each other."""
    mixer, x = make(), torch.randn(1, 9, 24).double()
    other = x.clone()
    other[:, :5] += 1
    apart = Context.begin(1, 9, pattern=Pattern.parse("block(5)"))
    assert torch.equal(mixer(x, apart)[:, 5:], mixer(other, apart)[:, 5:])
    assert not torch.equal(mixer(x, Context.begin(1, 9))[:, 5:], mixer(other, Context.begin(1, 9))[:, 5:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_and_rows_without_anything(dtype):
    for first in (None, {"layer": [{"mixer": "gated_retention", **LAYER}]}):
        mixer = make(first=first).to(dtype)
        valid = torch.arange(13) < torch.tensor([[13], [0], [5]])
        x = torch.randn(3, 13, 24, dtype=dtype)
        whole = mixer(x, Context.begin(3, 13, valid=valid))
        steps, _ = mixer.step(x, mixer.start(Context.begin(3, 0), 13), Context.begin(3, 13, valid=valid))
        assert bool(whole.isfinite().all())
        assert bool(steps.isfinite().all())


@torch.no_grad()
def test_gated_retention_forgets_without_harm():
    """Closed gates: over 100,000 positions the memory decays to zero and stays finite."""
    mixer = part(Mixer, {"part": "gated_retention", "temperature": 0.01}, width=4, heads=2)
    torch.nn.init.normal_(mixer.fade.weight, std=50)
    x = torch.randn(1, 1000, 4)
    state = mixer.start(Context.begin(1, 0), 0)
    for turn in range(100):
        y, state = mixer.step(x, state, Context.after(torch.tensor([1000 * turn]), 1000))
    assert bool(y.isfinite().all())
    assert bool(state.matrix.isfinite().all())
    assert state_bytes(state) == mixer.cost(1, 100_000).state


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"second": {"layer": [WINDOW]}}, "'mixer' is the attention over the cache"),
        ({"second": {"depth": 2}}, "second: a stack needs at least one layer"),
        ({"second": {"layer": [LAYER], "dept": 2}}, "second has no 'dept'; did you mean 'depth'"),
        ({"first": {"layer": [{"mixer": {"part": "attention", "pattern": "everything"}}]}}, "looks ahead"),
        ({"first": {"layer": [{"mixer": {"part": "gru", "hidden": 7}, "wiring": "plain"}]}}, "to 7, and must keep"),
        ({"kv_heads": 2}, "cannot share 2 kv_heads"),
        ({"position": "sinusoidal"}, "acts on token vectors"),
        ({"second": {"layer": [LAYER], "heads": 5}}, "not divisible by 5 heads"),
    ],
)
def test_bad_arguments(given, sentence):
    with pytest.raises(UserError, match=sentence):
        make(**given)


def test_bad_gates():
    with pytest.raises(UserError, match="temperature must be above 0"):
        part(Mixer, {"part": "gated_retention", "temperature": 0.0}, width=4, heads=2)
    with pytest.raises(UserError, match="rotates queries and keys"):
        part(Mixer, {"part": "gated_retention", "position": "alibi"}, width=4, heads=2)


def test_too_small_a_cache_grows():
    mixer, x, context = make(), torch.randn(1, 14, 24).double(), Context.begin(1, 14)
    torch.testing.assert_close(mixer.step(x, mixer.start(Context.begin(1, 0), 3), context)[0], mixer(x, context))
