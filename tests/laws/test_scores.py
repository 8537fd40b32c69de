"""The laws, over every file found in parts/scores, in every variant that it names, in attention of all shapes."""

import pytest
import torch

from regard.core import Context, Memory, Place, Score, UserError, part
from regard.parts.mixers.attention import Attention
from regard.schema import find, names
from regard.verify import laws

VARIANTS = [(name, index) for name in names(Score) for index in range(len(find(Score, name).examples))]


def attention(name: str, index: int, **given) -> Attention:
    torch.manual_seed(index)
    spec = {"part": name, **find(Score, name).examples[index]}
    return Attention(24, 3, score=spec, place=Place(memory=24), **given)


def test_all_are_found():
    assert {"scaled_dot", "dot", "general", "additive", "cosine", "location"} <= set(names(Score))


@pytest.mark.parametrize(("name", "index"), VARIANTS)
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("over", ["self", "memory"])
def test_laws(name, index, kv_heads, over):
    for finding in laws.check(attention(name, index, kv_heads=kv_heads, over=over)):
        assert finding.holds, f"{finding.law}: {finding.worst:.2e} > {finding.limit:.0e} ({finding.detail})"


@pytest.mark.parametrize(("name", "index"), [v for v in VARIANTS if v[0] not in ("additive", "location")])
def test_dots_run_on_the_fast_kernels(name, index):
    """Outputs and gradients as on the reference kernel."""
    x = torch.randn(2, 13, 24, dtype=torch.float64)
    results = []
    for kernel in ("reference", "sdpa"):
        mixer = attention(name, index, kv_heads=1, kernel=kernel).double()
        assert mixer.score.is_dot
        y = mixer(x, Context.begin(2, 13))
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in mixer.parameters())])
    for one, two in zip(*results, strict=True):
        assert laws.max_difference(one, two) < 1e-9


def compare(score: Score, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return score(score.query(q), score.key(k), torch.arange(k.shape[2])[None])


def test_what_each_says():
    """The equations of the papers, term by term."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 13, 8), torch.randn(2, 3, 11, 8)
    for name in names(Score):
        score = part(Score, {"part": name, **find(Score, name).examples[0]}, dim=8, heads=3, kv_heads=3, width=24)
        with torch.no_grad():
            said = compare(score, q, k)
        assert said.shape == (2, 3, 13, 11)
        one, two = q[1, 2, 5], k[1, 2, 7]
        want = {
            "dot": lambda: one @ two,
            "scaled_dot": lambda: one @ two / 8**0.5,
            "general": lambda: one @ score.weight[2] @ two,
            "cosine": lambda: 8**0.5 * torch.cosine_similarity(one, two, dim=0),
            "additive": lambda: score.v(torch.tanh(score.of_query(one) + score.of_key(two)))[0],
            "location": lambda: score.of_query.weight[7] @ one,
        }[name]()
        assert torch.allclose(said[1, 2, 5, 7], want.detach(), atol=1e-5), name


@pytest.mark.parametrize("name", ["general", "additive"])
def test_queries_and_keys_of_different_widths(name):
    score = part(Score, name, dim=8, heads=1, key_dim=5)
    assert compare(score, torch.randn(2, 1, 13, 8), torch.randn(2, 1, 11, 5)).shape == (2, 1, 13, 11)


def test_cosine_of_nothing_is_finite():
    score = part(Score, "cosine", dim=8, heads=3)
    q, k = torch.zeros(2, 3, 4, 8, requires_grad=True), torch.randn(2, 3, 5, 8)
    said = compare(score, q, k)
    said.sum().backward()
    assert bool((said == 0).all())
    assert bool(torch.isfinite(q.grad).all())


def test_location_refuses_positions_beyond_its_length():
    mixer = attention("location", 0)
    with torch.no_grad():
        mixer(torch.randn(2, 29, 24), Context.begin(2, 29))
        with pytest.raises(UserError, match="has 29 positions, and there is a key at position 29"):
            mixer(torch.randn(2, 30, 24), Context.begin(2, 30))
        across = attention("location", 0, over="memory")
        memory = Memory(torch.randn(2, 30, 24), torch.arange(30)[None] < torch.tensor([[7], [29]]))
        across(torch.randn(2, 40, 24), Context.begin(2, 40, memory=memory))  # the last place is padding
        with pytest.raises(UserError, match="there is a key at position 29"):
            across(torch.randn(2, 40, 24), Context.begin(2, 40, memory=memory._replace(valid=None)))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"part": "cosine", "strength": 0.0}, "strength must be above 0"),
        ({"part": "location", "length": 0}, "length must be at least 1"),
        ({"part": "location"}, "needs 'length'"),
    ],
)
def test_bad_arguments(given, sentence):
    with pytest.raises(UserError, match=sentence):
        part(Score, given, dim=8, heads=3, kv_heads=3, width=24)
