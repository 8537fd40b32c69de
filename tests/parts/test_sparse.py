"""Sparse recipes: the receptive field of two layers, the cost of longer sequences, and refused patterns."""

import pytest
import torch

import regard
from regard.bases import Attend, AttentionMask, blocks, layout
from regard.core import Context, Mixer, Pattern, Position, Score, UserError, load, part

SPARSE = ("local", "atrous", "sparse-strided", "sparse-fixed", "longformer", "bigbird", "longnet")


def patterns(name: str) -> list[Pattern]:
    model = regard.build(name, size="tiny", vocab=61)
    kinds = load(name, "tiny")["model"]["layer"]
    return [layer.branches["mixer"].pattern for layer in list(model.stack.layers)[: len(kinds)]]


def work(pattern: Pattern, length: int) -> float:
    """Pairs that are computed, per query."""
    return layout.share(pattern, length, blocks.BLOCK, torch.device("cpu")) * length


@pytest.mark.parametrize("name", SPARSE)
def test_twice_the_length_twice_the_work(name):
    """The block kernel is chosen automatically, and no mask of all pairs is made."""
    for pattern in patterns(name):
        each = getattr(pattern, "each", None) if name != "longnet" else _branches(pattern)
        for one in each or (pattern,):
            assert work(one, 4096) < 1.3 * work(one, 2048)
            assert work(one, 4096) <= 600
            at = torch.arange(4096)[None]
            q = torch.zeros(1, 4, 4096, 1)
            assert (
                Attend().choose(q, q, AttentionMask(one, at, at, from_start=True), Score(), Position(), 0.0) == "blocks"
            )


def _branches(pattern: Pattern) -> list[Pattern]:
    one, two = pattern.inner
    return [*(_branches(one) if type(one) is type(pattern) else [one]), two]


def test_two_sparse_layers_reach_everything():
    """As the paper says of all three ways to combine the two kinds: over layers, over heads, in one pattern."""
    whole = Pattern.parse("causal").mask(90)[0]
    near, far = (Pattern.parse(f"causal & {kind}(9)").mask(90)[0].float() for kind in ("window", "stride"))
    assert torch.equal(far @ near > 0, whole)  # first layer near, second far
    heads = Pattern.parse("causal & heads(window(9), stride(9))").mask(90).float().amax(0)
    assert torch.equal(heads @ heads > 0, whole)
    merged = Pattern.parse("causal & (window(9) | stride(9))").mask(90)[0].float()
    assert torch.equal(merged @ merged > 0, whole)
    summed = Pattern.parse("causal & fixed(9)").mask(90)[0].float()
    assert torch.equal(summed @ summed > 0, whole)
    assert not torch.equal(near @ near > 0, whole)


@pytest.mark.parametrize("pattern", ["causal & heads(window(64), stride(64))", "causal & (window(64) | stride(64))"])
def test_the_other_ways_to_combine(pattern):
    """An override makes of the recipe whatever the paper tries."""
    layers = [f"model.layer.{i}.mixer.pattern={pattern!r}" for i in (0, 1)]
    model = regard.build("sparse-strided", size="tiny", vocab=61, overrides=[*layers, "model.depth=2"]).eval()
    tokens = torch.randint(61, (2, 131))
    with torch.no_grad():
        whole, state = model(tokens), model.start(2, 131)
        first, state = model.step(tokens[:, :77], state)
        second, _ = model.step(tokens[:, 77:], state)
    assert torch.allclose(torch.cat((first, second), 1), whole, atol=1e-5)


def test_dilated_without_end_is_strided():
    """The golden file of strided attention is also one of atrous attention."""
    assert torch.equal(Pattern.parse("causal & dilated(99, 7)").mask(90), Pattern.parse("causal & stride(7)").mask(90))


def test_a_forgetful_cache():
    """Windows, atrous or not, keep as much as they can still see, however long the text; stride and fixed do not."""
    for name in ("local", "atrous", "longnet"):
        model = regard.build(name, size="tiny", vocab=61)
        assert model.cost(1, 1000).state == model.cost(1, 50_000).state, name
    model = regard.build("sparse-fixed", size="tiny", vocab=61)
    assert 20 < model.cost(1, 60_000).state / model.cost(1, 1000).state < 60  # a sixteenth of the columns


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("window(0)", "window.size must be at least 1, not 0"),
        ("dilated(3, 0)", "dilated.rate must be at least 1"),
        ("stride(-4)", "stride.every must be at least 1"),
        ("stride(2.5)", "stride.every must be a whole number"),
        ("fixed(8, 4, 3)", "3 turns of 4 columns do not fit into a block of 8"),
        ("block(0)", "block.size must be at least 1"),
        ("block(4, 4, -1)", "block.after must be at least 0"),
        ("marked(3)", "belongs in a call, not in a recipe"),
        ("random_blocks(0)", "random_blocks.count must be at least 1"),
        ("causal & window(4) & ~window(4)", "leaves position 0 with nothing to see"),
        ("causal & heads(window(2), window(2), window(2), window(2), window(2))", "is for 5 heads, and there are 4"),
    ],
)
def test_patterns_that_are_refused(pattern, said):
    """Invalid patterns are refused in one sentence when the model is built."""
    with pytest.raises(UserError) as error:
        regard.build("local", size="tiny", vocab=61, overrides=[f"model.layer.0.mixer.pattern='{pattern}'"])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_seed_that_leaves_somebody_blind(seed):
    """Random links alone may leave a block without a key to see: refused when it is asked, never answered by zeros."""
    links = f"random_blocks(1, 4, {seed}, 40)"
    with pytest.raises(UserError, match=r"leaves position \d+ with nothing to see"):
        see(f"causal & {links}")
    with pytest.raises(UserError, match="leaves position 0 with nothing to see"):
        see(f"{links} & ~everything")
    assert bool(see(f"causal & (window(1) | {links})").isfinite().all())


def see(pattern: str) -> torch.Tensor:
    mixer = part(Mixer, {"part": "attention", "pattern": pattern}, width=8, heads=2)
    return mixer(torch.randn(1, 40, 8), Context.begin(1, 40))
