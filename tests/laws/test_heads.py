"""The laws of embeds and heads, over every file found in parts/ and every variant that it names: shapes, padding that
changes nothing, steps that give what the whole gives, and flops as counted."""

import pytest
import torch

import regard
from regard.core import Context, Embed, Head, UserError, part
from regard.schema import find, names
from regard.verify.laws import LIMIT, count_flops, max_difference

WIDTH, VOCAB, BATCH, TIME = 24, 31, 4, 13
HEADS = [(name, index) for name in names(Head) for index in range(len(find(Head, name).examples))]
EMBEDS = [(name, index) for name in names(Embed) for index in range(len(find(Embed, name).examples))]
LENGTHS = torch.tensor([13, 1, 7, 12])
VALID = torch.arange(TIME)[None] < LENGTHS[:, None]


def make(contract, name, index):
    torch.manual_seed(index)
    spec = {"part": name, **find(contract, name).examples[index]}
    return part(contract, spec, width=WIDTH, vocab=VOCAB, heads=3, dropout=0.1).double().eval()


@pytest.mark.parametrize(("name", "index"), HEADS)
class TestHeads:
    def inputs(self):
        return torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64, requires_grad=True)

    def test_shape(self, name, index):
        head = make(Head, name, index)
        y = head(self.inputs(), Context.begin(BATCH, TIME, valid=VALID))
        assert y.shape[:-1] == ((BATCH,) if head.pools else (BATCH, TIME))
        assert y.dtype == torch.float64

    def test_padding_changes_nothing(self, name, index):
        head, x = make(Head, name, index), self.inputs()
        whole = head(x, Context.begin(BATCH, TIME, valid=VALID))
        noisy = torch.where(VALID[..., None], x, 1e3 * torch.randn_like(x))
        other = head(noisy, Context.begin(BATCH, TIME, valid=VALID))
        real = slice(None) if head.pools else VALID
        assert max_difference(other[real].detach(), whole[real].detach()) <= LIMIT
        for row, length in enumerate(LENGTHS.tolist()):
            alone = head(x[row : row + 1, :length], Context.begin(1, length))[0]
            same = whole[row] if head.pools else whole[row, :length]
            assert max_difference(same.detach(), alone.detach()) <= LIMIT
        whole[real].square().sum().backward()
        assert bool((x.grad[~VALID] == 0).all())
        assert bool(torch.isfinite(x.grad).all())

    def test_row_without_anything_is_finite(self, name, index):
        head, x = make(Head, name, index), self.inputs()
        y = head(x, Context.begin(BATCH, TIME, valid=VALID & (torch.arange(BATCH) != 2)[:, None]))
        y.sum().backward()
        assert bool(torch.isfinite(y).all())
        assert bool(torch.isfinite(x.grad).all())

    def test_flops(self, name, index):
        head = make(Head, name, index)
        for length in (1, TIME):
            x = self.inputs()[:1, :length].detach()
            assert head.flops(length) == count_flops(head, lambda x=x: head(x, Context.begin(1, x.shape[1])))


@pytest.mark.parametrize(("name", "index"), EMBEDS)
class TestEmbeds:
    def test_shape(self, name, index):
        embed = make(Embed, name, index)
        x = embed(embed.random_input(BATCH, TIME), Context.begin(BATCH, TIME))
        assert x.shape == (BATCH, TIME, WIDTH)
        assert x.dtype == torch.float64

    def test_padding_changes_nothing(self, name, index):
        embed = make(Embed, name, index)
        tokens = embed.random_input(BATCH, TIME)
        whole = embed(tokens, Context.begin(BATCH, TIME, valid=VALID)).detach()
        mask = VALID.view(BATCH, TIME, *[1] * (tokens.dim() - 2))
        noisy = torch.where(mask, tokens, embed.random_input(BATCH, TIME))
        other = embed(noisy, Context.begin(BATCH, TIME, valid=VALID)).detach()
        assert max_difference(other[VALID], whole[VALID]) <= LIMIT

    def test_rows_at_different_places(self, name, index):
        """Each row continues from its own position, and gives what it gives in one pass."""
        embed = make(Embed, name, index)
        tokens = embed.random_input(BATCH, TIME)
        segments = torch.randint(getattr(embed, "segment_table", torch.ones(1)).shape[0], (BATCH, TIME))
        whole = embed(tokens, Context.begin(BATCH, TIME, segments=segments)).detach()
        past, time = torch.tensor([0, 5, 9, 3]), 4
        at = past[:, None] + torch.arange(time)
        rows = torch.arange(BATCH)[:, None]
        step = embed(tokens[rows, at], Context.after(past, time, segments=segments[rows, at]))
        assert max_difference(step.detach(), whole[rows, at]) <= LIMIT

    def test_flops(self, name, index):
        embed = make(Embed, name, index)
        tokens = embed.random_input(1, TIME)
        assert embed.flops(TIME) == count_flops(embed, lambda: embed(tokens, Context.begin(1, TIME)))


def test_segments_are_read():
    embed = part(Embed, {"part": "segments", "types": 3, "norm": "none"}, width=WIDTH, vocab=VOCAB)
    tokens, segments = embed.random_input(2, 5), torch.tensor([[0, 0, 1, 2, 2], [1, 1, 1, 0, 0]])
    want = embed.table[tokens] + embed.segment_table[segments]
    assert torch.allclose(embed(tokens, Context.begin(2, 5, segments=segments)), want)
    none = embed(tokens, Context.begin(2, 5))
    assert torch.equal(none, embed(tokens, Context.begin(2, 5, segments=torch.zeros_like(tokens))))


@pytest.mark.parametrize("how", ["first", "last", "mean", "max"])
def test_pools(how):
    """Pooling against its definition, row by row."""
    head = part(Head, {"part": "regress", "outputs": WIDTH, "pool": how}, width=WIDTH)
    torch.nn.init.eye_(head.out.weight)
    torch.nn.init.zeros_(head.out.bias)
    x = torch.randn(BATCH, TIME, WIDTH)
    y = head(x, Context.begin(BATCH, TIME, valid=VALID))
    for row, length in enumerate(LENGTHS.tolist()):
        real = x[row, :length]
        want = {"first": real[0], "last": real[-1], "mean": real.mean(0), "max": real.max(0).values}[how]
        assert torch.allclose(y[row], want, atol=1e-6)


@pytest.mark.parametrize("head", [{"part": "regress", "outputs": 3}, {"part": "tag", "classes": 5}])
def test_vectors_to_answers(head):
    """A model over continuous input; a row of a padded batch gives what it gives alone."""
    torch.manual_seed(0)
    layer = {"mixer": {"part": "attention", "pattern": "everything"}, "feedforward": {"part": "glu", "hidden": 10}}
    embed = {"part": "vectors", "channels": 5, "position": "sinusoidal"}
    model = {"kind": "encoder", "width": WIDTH, "heads": 3, "layer": [layer], "embed": embed, "head": head}
    model = regard.build({"model": model}, vocab=1).double().eval()
    x = torch.randn(BATCH, TIME, 5, dtype=torch.float64)
    with torch.no_grad():
        whole = model(x, valid=VALID)
        assert whole.shape == ((BATCH, 3) if model.head.pools else (BATCH, TIME, 5))
        for row, length in enumerate(LENGTHS.tolist()):
            alone = model(x[row : row + 1, :length])[0]
            assert max_difference(whole[row] if model.head.pools else whole[row, :length], alone) <= LIMIT
    assert model.cost(TIME).flops == count_flops(model, lambda: model(x[:1]))


def test_softcap_and_scale():
    head = part(Head, {"part": "vocabulary", "bias": True, "scale": 3.0, "softcap": 2.0}, width=WIDTH, vocab=VOCAB)
    torch.nn.init.normal_(head.bias)
    x = torch.randn(2, 5, WIDTH)
    want = 2 * torch.tanh((3 * x @ head.table.T + head.bias) / 2)
    assert torch.allclose(head(x, Context.begin(2, 5)), want, atol=1e-5)


def transformer(tie, **more):
    torch.manual_seed(0)
    layer = {"mixer": {"part": "attention", "pattern": "everything"}}
    decoder = {"mixer": "attention", "cross": {"part": "attention", "over": "memory"}}
    model = {
        "kind": "encoder-decoder", "width": WIDTH, "heads": 3, "tie": tie,
        "encoder": {"layer": [layer]}, "decoder": {"layer": [decoder]}, **more,
    }  # fmt: skip
    return regard.build({"model": model}, vocab=VOCAB)


def test_three_way_tie(tmp_path):
    """One parameter, whose gradient is the sum of its three uses, also after saving, loading and changing the dtype."""
    tokens, source = torch.randint(VOCAB, (2, 13)), torch.randint(VOCAB, (2, 11))
    model, loose = transformer("all"), transformer("none")
    loose.load_state_dict(model.state_dict())  # names every table, tied or not
    uses = ("embed.table", "source_embed.table", "head.table")
    assert len(list(loose.parameters())) == len(list(model.parameters())) + 2
    for one in (model, loose):
        one(tokens, source=source).square().sum().backward()
    apart = sum(loose.get_parameter(name).grad for name in uses)
    assert torch.allclose(model.embed.table.grad, apart, rtol=1e-4, atol=1e-4)
    assert all(float(loose.get_parameter(name).grad.abs().max()) > 0.1 for name in uses)
    regard.save(model, tmp_path)
    for one in (model, regard.restore(tmp_path), regard.restore(tmp_path).double()):
        assert all(one.get_parameter(name) is one.embed.table for name in uses)
        assert torch.equal(one.embed.table.float(), model.embed.table)


def test_tie_with_factors():
    """A narrow table is tied to a head with a hidden layer of as many channels."""
    model = transformer("all", embed={"part": "tokens", "dim": 10}, head={"part": "vocabulary", "hidden": 10})
    assert model.head.table is model.embed.table is model.source_embed.table
    assert model.head.table.shape == (VOCAB, 10)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"embed": {"part": "tokens", "dim": 10}}, "cannot be tied to a table of (31, 10)"),
        ({"head": {"part": "classify", "classes": 3}}, "head 'classify' has no table"),
        ({"embed": {"part": "vectors", "channels": 5}}, "needs an embed with a table"),
        ({"embed": {"part": "tokens", "position": "rotary"}}, "'rotary' acts in attention"),
        ({"head": {"part": "classify", "classes": 1}}, "at least 2"),
        ({"head": {"part": "regress", "pool": "men"}}, "did you mean 'mean'?"),
        ({"head": {"part": "vocabulary", "softcap": 0.0}}, "softcap must be above 0"),
        ({"encoder": {"embed": {"part": "tokens", "dim": 10}, "layer": [{"mixer": "attention"}]}}, "cannot share"),
    ],
)
def test_bad_recipes(more, message):
    with pytest.raises(UserError) as error:
        transformer("all", **more)
    assert message in str(error.value)


def test_bad_inputs():
    model = transformer("all")
    good = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(UserError, match="tokens range from 0 to 31, but the table has rows 0 to 30"):
        model(good + torch.tensor([0, 0, 31, 0, 0]), source=good)
    with pytest.raises(UserError, match="tokens must be whole numbers"):
        model(good.float(), source=good)
    vectors = part(Embed, {"part": "vectors", "channels": 5}, width=WIDTH)
    with pytest.raises(UserError, match=r"\(batch, time, 5\)"):
        vectors(torch.randn(2, 7, 4), Context.begin(2, 7))
