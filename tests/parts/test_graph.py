"""Graph attention: against the plain formula on a matrix, on graphs that no matrix could hold, and its two scores."""

import pytest
import torch
import torch.nn.functional as F

import regard
from regard import UserError
from regard.core import Context, Embed, Head, Mixer, Pattern, find, part, watch

NODES, WIDTH, HEADS, DIM = 13, 16, 3, 5


def adjacency(rows: int = 1) -> torch.Tensor:
    """(rows, nodes, nodes), where node 4 has no neighbors."""
    made = torch.rand(rows, NODES, NODES, generator=torch.Generator().manual_seed(3)) < 0.3
    made[:, 4] = False
    return made


def as_edges(allowed: torch.Tensor) -> Pattern:
    return find(Pattern, "edges")(allowed.nonzero().T)


def make(name: str, **given) -> Mixer:
    torch.manual_seed(1)
    mixer = part(Mixer, {"part": name, "dim": DIM, **given}, width=WIDTH, heads=HEADS).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return mixer.eval()


def plain(mixer: Mixer, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """x (nodes, width), allowed (nodes, nodes): every pair, head by head."""
    y = []
    for head in range(HEADS):
        rows = slice(head * DIM, (head + 1) * DIM)
        if hasattr(mixer, "into"):
            values = x @ mixer.into.weight[rows].T
            of_query, of_key = (values @ mixer.score[head]).T
            scores = F.leaky_relu(of_query[:, None] + of_key[None], mixer.slope)
        else:
            queries, values = (F.linear(x, m.weight[rows], m.bias[rows]) for m in (mixer.of_query, mixer.of_key))
            scores = F.leaky_relu(queries[:, None] + values[None], mixer.slope) @ mixer.score[head]
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num(0.0)
        y.append(weights @ values)
    joined = torch.cat(y, -1) if mixer.join == "concat" else torch.stack(y).mean(0)
    return F.elu(joined + mixer.bias)


@pytest.mark.parametrize("name", ["gat", "gatv2"])
@pytest.mark.parametrize("join", ["concat", "mean"])
@pytest.mark.parametrize("loops", [True, False])
def test_the_formula(name, join, loops):
    mixer, allowed = make(name, join=join, loops=loops, slope=0.3), adjacency()[0]
    x = torch.randn(1, NODES, WIDTH, dtype=torch.float64, requires_grad=True)
    seen = allowed | torch.eye(NODES, dtype=torch.bool) if loops else allowed
    y = mixer(x, Context.begin(1, NODES, pattern=as_edges(allowed)))
    want = plain(mixer, x[0], seen)
    assert torch.allclose(y[0], want, atol=1e-12)
    down = torch.randn_like(want)
    ours, theirs = (torch.autograd.grad((out * down).sum(), x)[0] for out in (y[0], want))
    assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("name", ["gat", "gatv2"])
def test_a_graph_for_each_row(name):
    """A matrix per row gives what each graph gives alone, and padding is no node of it."""
    mixer, allowed = make(name, pattern="window(6)"), adjacency(2)
    x = torch.randn(2, NODES, WIDTH, dtype=torch.float64)
    valid = torch.arange(NODES) < torch.tensor([[NODES], [9]])
    y = mixer(x, Context.begin(2, NODES, valid=valid, pattern=find(Pattern, "matrix")(allowed)))
    for row, length in enumerate((NODES, 9)):
        own = as_edges(allowed[row, :length, :length])
        alone = mixer(x[row : row + 1, :length], Context.begin(1, length, pattern=own))
        assert torch.allclose(y[row, :length], alone[0])
    assert y.isfinite().all()
    for pattern, sentence in (
        (find(Pattern, "matrix")(adjacency(3)), "is for 3 sequences"),
        (Pattern.parse("heads(causal, window(2))"), "another one for each head"),
    ):
        with pytest.raises(UserError, match=sentence):
            mixer(x, Context.begin(2, NODES, pattern=pattern))


def test_a_graph_that_no_matrix_could_hold():
    """A ring of 300,000 nodes: all pairs of them would be 90 GB."""
    nodes = 300_000
    at = torch.arange(nodes)
    ring = find(Pattern, "edges")(torch.stack((at, (at + 1) % nodes)))
    mixer = part(Mixer, {"part": "gat", "loops": False, "activation": "identity"}, width=2, heads=1)
    x = torch.randn(1, nodes, 2)
    y = mixer(x, Context.begin(1, nodes, pattern=ring))
    assert torch.allclose(y[0], mixer.into(x)[0].roll(-1, 0), atol=1e-6)  # there is one to look at, with all the weight


def test_whose_order():
    """In gat all nodes rank their neighbors alike; in gatv2 each may rank them differently."""

    def orders(name):
        mixer = make(name, loops=False)
        with watch(mixer, "weights") as seen:
            mixer(torch.randn(1, NODES, WIDTH, dtype=torch.float64), Context.begin(1, NODES))
        weights = seen["weights"][0].view(NODES, NODES, HEADS)  # all look at all
        return {tuple(row.argsort().tolist()) for row in weights[..., 0]}

    assert len(orders("gat")) == 1
    assert len(orders("gatv2")) > 1


def test_edges_of_patterns():
    """However a pattern is made, its edges are the pairs that it allows."""
    listed = as_edges(adjacency()[0])
    window, matrix = Pattern.parse("window(2)"), find(Pattern, "matrix")(adjacency(2))
    for pattern in (
        listed,
        listed & window,
        window & listed,
        listed | window,
        ~listed,
        window,
        matrix,
        matrix & listed,
    ):
        found = torch.zeros(pattern.rows, NODES + 2, NODES + 2, dtype=torch.bool)
        found[tuple(pattern.edges(NODES + 2))] = True
        at = torch.arange(NODES + 2)
        assert torch.equal(found, pattern.allows(at[None, None, :, None], at[None, None, None])[:, 0]), str(pattern)
        assert pattern.edges(NODES + 2).shape[1] == found.sum()
    assert int(listed.edges(3).max()) < 3
    twice = find(Pattern, "edges")(torch.tensor([[2, 2, 0], [1, 1, 0]]))
    assert twice.edges(5).tolist() == [[0, 0], [0, 2], [0, 1]]
    for pairs in (torch.ones(3, 4).long(), torch.tensor([[0.5], [1.0]]), torch.tensor([[0], [-1]]), [[0], [1]]):
        with pytest.raises(UserError, match="the edges of a graph"):
            find(Pattern, "edges")(pairs)


def test_bags_dense_and_sparse():
    torch.manual_seed(0)
    embed = part(Embed, {"part": "bag", "shares": True, "dropout": 0.5}, width=6, vocab=11).double().eval()
    dense = torch.where(torch.rand(2, 7, 11) < 0.3, torch.rand(2, 7, 11, dtype=torch.float64), 0.0)
    dense[1, 3] = 0
    context, down = Context.begin(2, 7), torch.randn(2, 7, 6, dtype=torch.float64)
    results = []
    for counts in (dense, dense.to_sparse()):
        embed.zero_grad()
        y = embed(counts, context)
        (y * down).sum().backward()
        results.append((y.detach(), embed.table.grad.clone()))
    for one, two in zip(*results, strict=True):
        assert torch.allclose(one, two)
    shares = dense / dense.sum(-1, keepdim=True).clamp(min=1e-30)
    assert torch.allclose(results[0][0], shares @ embed.table)
    embed.train()
    many = torch.stack([embed(dense.to_sparse(), context).detach() for _ in range(2000)])
    assert torch.allclose(many.mean(0), results[0][0], atol=0.05)
    assert many.std(0)[0].max() > 0.01
    with pytest.raises(UserError, match=r"\(batch, time, 11\)"):
        embed(dense[..., :5], context)


def test_refusals():
    with pytest.raises(UserError, match="join must be 'concat' or 'mean'"):
        make("gat", join="sum")
    with pytest.raises(UserError, match="is not divisible by 3 heads"):
        part(Mixer, "gatv2", width=16, heads=3)
    with pytest.raises(UserError, match="set project = true"):
        make("gat", project=False)
    with pytest.raises(UserError, match="one head, or the mean"):
        part(Head, {"part": "mixed", "classes": 4, "mixer": {"part": "gat", "heads": 2}}, width=8, vocab=3)
    with pytest.raises(UserError, match=r"head: looks ahead, and a decoder must not"):
        regard.build(
            "transformer-decoder",
            size="tiny",
            vocab=9,
            overrides=["model.tie=none", "model.head={part='mixed', mixer='gat'}"],
        )
    with pytest.raises(UserError, match="does not step"):
        regard.build("gat", size="tiny", vocab=9).start(1, 5)
    with pytest.raises(UserError, match="does not step"):
        make("gat").step(torch.zeros(1, 1, WIDTH), make("gat").start(Context.begin(1, 0), 1), Context.begin(1, 1))
