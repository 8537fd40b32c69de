"""The laws of positions, over every file found in parts/positions, in every variant that it names."""

import math

import pytest
import torch

import regard
from regard.core import Context, Model, Position, UserError, part, watch
from regard.parts.mixers.attention import Attention
from regard.schema import find, names
from regard.verify import laws

VARIANTS = [(name, index) for name in names(Position) for index in range(len(find(Position, name).examples))]
EMBEDS = [v for v in VARIANTS if find(Position, v[0]).embed is not Position.embed]
INSIDE = [v for v in VARIANTS if v not in EMBEDS]
RELATIVE = [v for v in INSIDE if find(Position, v[0]).relative]


def spec(name: str, index: int) -> dict:
    return {"part": name, **find(Position, name).examples[index]}


def attention(name: str, index: int, **given) -> Attention:
    torch.manual_seed(index)
    return Attention(**({"width": 24, "heads": 3, "position": spec(name, index)} | given)).double().eval()


def model(position: dict) -> Model:
    torch.manual_seed(0)
    layer = {"mixer": {"part": "attention"}, "feedforward": {"part": "mlp", "hidden": 16}, "wiring": "pre"}
    table = {"kind": "decoder", "width": 24, "heads": 3, "layer": [layer]}
    return regard.build({"model": table | {"embed": {"part": "tokens", "position": position}}}, vocab=17)


def hold(findings: list[laws.Finding]) -> None:
    for finding in findings:
        assert finding.holds, f"{finding.law}: {finding.worst:.2e} > {finding.limit:.0e} ({finding.detail})"


def test_all_are_found():
    known = {"none", "sinusoidal", "learned", "rotary", "alibi", "t5", "shaw", "transformer_xl", "xpos"}
    assert known <= set(names(Position))


@pytest.mark.parametrize(("name", "index"), INSIDE)
def test_laws_in_attention(name, index):
    hold(laws.check(attention(name, index)))


@pytest.mark.parametrize("name", sorted({name for name, _ in INSIDE}))
def test_laws_with_a_cache_that_forgets(name):
    """`cost` does not count that dropped keys also drop their distances; all other laws hold."""
    findings = laws.check(attention(name, 0, kv_heads=1, pattern="causal & window(5)"))
    hold([finding for finding in findings if finding.law != "cost"])


@pytest.mark.parametrize("name", sorted({name for name, _ in INSIDE}))
def test_laws_over_a_memory(name):
    hold(laws.check(attention(name, 0, over="memory")))


@pytest.mark.parametrize("name", sorted({name for name, _ in INSIDE}))
def test_one_part_for_all_layers(name):
    """As T5 shares its table: two layers, one position. FLOATER's layers have a beginning of their own each."""
    torch.manual_seed(0)
    layer = {"mixer": {"part": "attention", "position": "shared"}, "wiring": "pre"}
    table = {"kind": "decoder", "width": 24, "heads": 3, "depth": 2, "layer": [layer], "position": spec(name, 0)}
    one = regard.build({"model": table}, vocab=17)
    first, second = (layer.branches["mixer"].position for layer in one.stack.layers)
    assert first is second or (name == "floater" and first.flow is second.flow)
    hold(laws.check(one, without=["long", "branches"]))
    torch.manual_seed(0)
    hold([laws.long(laws.Subject(one), 150)])  # more than two chunks, as there is no window


@pytest.mark.parametrize(("name", "index"), INSIDE)
def test_laws_in_both_directions(name, index):
    hold(laws.check(attention(name, index, pattern="everything")))


@pytest.mark.parametrize(("name", "index"), EMBEDS)
def test_laws_in_an_embed(name, index):
    hold(laws.check(model(spec(name, index))))


@pytest.mark.parametrize(("name", "index"), RELATIVE)
@pytest.mark.parametrize("pattern", ["causal", "everything"])
def test_only_differences_matter(name, index, pattern):
    """Shifting all positions changes neither scores nor outputs."""
    mixer = attention(name, index, pattern=pattern, kernel="reference")
    x = torch.randn(2, 13, 24, dtype=torch.float64)
    at = torch.stack((torch.arange(13), torch.arange(3, 16)))
    results = []
    for shift in (0, 1, 1000):
        with watch(mixer) as seen, torch.no_grad():
            y = mixer(x, Context(at + shift))
        results.append((y, seen["attend.weights"][0]))
    for y, weights in results[1:]:
        assert laws.max_difference(y, results[0][0]) < 1e-9
        assert laws.max_difference(weights, results[0][1]) < 1e-9


@pytest.mark.parametrize(("name", "index"), [v for v in RELATIVE if v[0] != "none"])
def test_differences_do_matter(name, index):
    """The output depends on the positions."""
    mixer = attention(name, index, pattern="everything")
    x = torch.randn(2, 13, 24, dtype=torch.float64)
    at = torch.arange(13).expand(2, 13)
    with torch.no_grad():
        assert laws.max_difference(mixer(x, Context(at)), mixer(x.roll(4, 1), Context(at)).roll(-4, 1)) > 1e-4


@pytest.mark.parametrize(("name", "index"), EMBEDS)
def test_a_place_is_the_same_everywhere(name, index):
    """The same vector in every row and column; others at other places."""
    torch.manual_seed(index)
    position = part(Position, spec(name, index), width=24).double()
    at = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [20, 3, 20, 0, 1]])
    with torch.no_grad():
        added = position.embed(torch.zeros(3, 5, 24, dtype=torch.float64), at)
    for place in at.unique():
        found = added[at == place]
        assert torch.equal(found, found[:1].expand_as(found))
    first = torch.stack([added[at == place][0] for place in at.unique()])
    assert torch.pdist(first).min() > 1e-3


@pytest.mark.parametrize(("name", "index"), VARIANTS)
def test_casting_the_model_does_not_coarsen_places(name, index):
    """Constants are exact whatever dtype the model is in: there and back is the same."""
    torch.manual_seed(index)
    position = part(Position, spec(name, index), width=24, heads=3, dim=8).double()
    moved = part(Position, spec(name, index), width=24, heads=3, dim=8).bfloat16().double()
    moved.load_state_dict(position.state_dict())
    q, at = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.arange(20, 25).expand(2, 5)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(position.query(q, at), moved.query(q, at))
        assert torch.equal(position.embed(x, at), moved.embed(x, at))
        biases = [p.bias(at[:, None, :, None], at[:, None, None, :], q) for p in (position, moved)]
        assert biases[0] is None or torch.equal(*biases)


@pytest.mark.parametrize(("name", "index"), [v for v in EMBEDS if find(Position, v[0]).examples[v[1]].get("length")])
def test_beyond_the_limit_is_refused(name, index):
    limit = find(Position, name).examples[index]["length"]
    one = model(spec(name, index)).eval()
    tokens = torch.zeros(2, limit, dtype=torch.long)
    with torch.no_grad():
        one(tokens)
        with pytest.raises(UserError, match=f"a sequence of {limit + 1} is longer than this model's {limit} positions"):
            one(torch.zeros(2, limit + 1, dtype=torch.long))
        with pytest.raises(UserError, match=f"positions reach {limit}; a capacity of {limit + 1}"):
            one.start(2, limit + 1)
        _, state = one.step(tokens, one.start(2, limit))
        with pytest.raises(UserError, match=f"position {limit} is beyond the model.s {limit} positions"):
            one.step(tokens[:, :1], state)


def test_xpos_stays_in_range_up_to_its_limit():
    """In single precision, at both ends and between them."""
    mixer = attention("xpos", 0, position={"part": "xpos", "centre": 20000}).float()
    exact = attention("xpos", 0, position={"part": "xpos", "centre": 20000})
    limit = mixer.position.limit
    assert 40000 < limit < 50000
    x = torch.randn(2, 13, 24)
    for start in (0, 20000, limit - 13):
        at = Context(torch.arange(start, start + 13).expand(2, 13))
        with torch.no_grad():
            assert laws.max_difference(mixer(x, at).double(), exact(x.double(), at)) < 1e-4
    with pytest.raises(UserError, match="centre must be from 0 to"):
        part(Position, {"part": "xpos", "centre": 10**6}, dim=8)


def test_both_orders_of_transformer_xl_agree():
    """Many queries project the positions, few queries project themselves."""
    torch.manual_seed(0)
    position = part(Position, "transformer_xl", width=24, heads=3, dim=8).double()
    q, at = torch.randn(1, 3, 40, 8, dtype=torch.float64), torch.arange(40)[None, None]
    assert position._work(40, 79)[0]
    assert not position._work(1, 40)[0]
    with torch.no_grad():
        whole = position.bias(at[..., None], at[:, :, None], q)
        one = position.bias(at[..., 39:, None], at[:, :, None], q[:, :, 39:])
    assert laws.max_difference(one, whole[:, :, 39:]) < 1e-12


@pytest.mark.parametrize("index", range(4))
def test_what_transformer_xl_says(index):
    """The second term of the paper's score, position by position."""
    torch.manual_seed(0)
    given = find(Position, "transformer_xl").examples[index]
    position = part(Position, {"part": "transformer_xl", **given}, width=24, heads=3, dim=8).double()
    q = torch.randn(2, 3, 13, 8, dtype=torch.float64)
    with torch.no_grad():
        at = torch.arange(13)[None, None]
        said = position.bias(at[..., None], at[:, :, None], position.bias_query(q))
        for i, j in ((0, 0), (9, 2), (12, 0), (3, 9)):
            far = i - j if given.get("bidirectional", True) else max(i - j, 0)
            far = max(min(far, given.get("clip", 99)), -given.get("clip", 99))
            angle = far * 10000 ** (-torch.arange(0, 24, 2, dtype=torch.float64) / 24)
            place = position.of_place(torch.cat((angle.sin(), angle.cos()))).view(3, 8)
            want = ((q[:, :, i] + position.v) * place).sum(-1)
            assert laws.max_difference(said[:, :, i, j], want) < 1e-9


def turned(**given) -> torch.Tensor:
    return torch.tensor(part(Position, {"part": "rotary", **given}, dim=16).rates, dtype=torch.float64)


def test_scalings_of_rotary():
    """Which frequencies each scaling keeps and which it lowers, the highest first."""
    plain = turned()
    assert torch.allclose(turned(scaling={"kind": "linear", "factor": 8}), plain / 8)

    same = turned(scaling={"kind": "dynamic", "factor": 4.0, "original": 64, "length": 50})
    assert torch.allclose(same, plain)
    slow = turned(scaling={"kind": "dynamic", "factor": 1.0, "original": 64, "length": 256})
    assert torch.allclose(slow, turned(base=10000.0 * 4 ** (16 / 14)))

    fits = 8192 * plain / (2 * math.pi)
    llama = turned(scaling={"kind": "llama3", "factor": 8.0, "original": 8192})
    assert torch.allclose(llama[fits > 4], plain[fits > 4])
    assert torch.allclose(llama[fits < 1], plain[fits < 1] / 8)
    assert bool(((llama < plain) & (llama > plain / 8))[(fits > 1) & (fits < 4)].all())

    yarn = part(Position, {"part": "rotary", "scaling": {"kind": "yarn", "factor": 4.0, "original": 4096}}, dim=16)
    ratio = plain / torch.tensor(yarn.rates, dtype=torch.float64)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(4)
    assert bool((ratio.diff() >= 0).all())
    assert yarn.strength == pytest.approx(1 + 0.1 * math.log(4))

    table = {"kind": "longrope", "short": [1.0] * 8, "long": [1.0 + i for i in range(8)], "original": 64}
    assert torch.allclose(turned(scaling=table | {"length": 64}), plain)
    assert torch.allclose(turned(scaling=table | {"length": 128}), plain / (1 + torch.arange(8)))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"part": "learned", "length": 0}, "length must be at least 1"),
        ({"part": "rotary", "fraction": 0.2}, "an even number of channels"),
        ({"part": "rotary", "layout": "half"}, "'interleaved' or 'halves'"),
        ({"part": "rotary", "base": 1.0}, "base must be above 1"),
        ({"part": "rotary", "scaling": {"kind": "lama3"}}, "scaling: .*did you mean 'llama3'"),
        ({"part": "rotary", "scaling": "yarn"}, "rotary.scaling must be a table"),
        ({"part": "rotary", "scaling": {"kind": "linear", "factr": 2}}, "scaling: .*did you mean 'factor'"),
        ({"part": "rotary", "scaling": {"kind": "linear", "factor": 0}}, "linear.factor must be above 0"),
        ({"part": "rotary", "scaling": {"kind": "yarn", "factor": 2, "original": 8, "fast": 0.5}}, "fast above slow"),
        ({"part": "rotary", "scaling": {"kind": "llama3", "factor": 2, "original": 8, "low": 4}}, "high above low"),
        (
            {"part": "rotary", "scaling": {"kind": "longrope", "short": [1], "long": [1], "original": 8, "length": 9}},
            "each of 4 pairs",
        ),
        ({"part": "t5", "buckets": 5}, "even and at least 4"),
        ({"part": "t5", "max_distance": 8}, "max_distance must be above 8"),
        ({"part": "shaw", "clip": 0}, "clip must be at least 1"),
        ({"part": "transformer_xl", "clip": 0}, "clip must be at least 1"),
        ({"part": "xpos", "gamma": 0.0}, "gamma > 0"),
    ],
)
def test_bad_arguments(given, sentence):
    with pytest.raises(UserError, match=sentence):
        part(Position, given, width=24, heads=3, dim=8)


@pytest.mark.parametrize("name", ["shaw", "transformer_xl"])
def test_a_position_that_asks_needs_a_dot_product(name):
    with pytest.raises(UserError, match=f"position '{name}' needs a score that is a dot product, and 'additive'"):
        Attention(24, 3, position=name, score="additive")


@pytest.mark.parametrize("name", ["shaw", "transformer_xl"])
@pytest.mark.parametrize("scale", [0.25, 0.5])
def test_a_bias_has_the_scale_of_the_score(name, scale):
    """Everything that is compared, twice as large: as a score of four times the scale."""
    torch.manual_seed(0)
    one = Attention(24, 3, position=name, score={"part": "scaled_dot", "scale": 4 * scale}).double()
    two = Attention(24, 3, position=name, score={"part": "scaled_dot", "scale": scale}).double()
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        changed = [two.q.weight, two.q.bias, two.k.weight, two.k.bias]
        changed += [two.position.keys] if name == "shaw" else [getattr(two.position, p) for p in "uv"]
        changed += [two.position.of_place.weight] if name == "transformer_xl" else []
        for weight in changed:
            weight.mul_(2)
        x = torch.randn(2, 13, 24, dtype=torch.float64)
        assert laws.max_difference(two(x, Context.begin(2, 13)), one(x, Context.begin(2, 13))) < 1e-9
