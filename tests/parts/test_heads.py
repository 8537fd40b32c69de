"""Heads with several outputs, and positions stored as a table: what the laws over all parts do not cover."""

import pytest
import torch

import regard
from regard.core import Context, Head, Position, UserError, part

WIDTH, VOCAB, BATCH, TIME = 24, 31, 3, 7
VALID = torch.arange(TIME)[None] < torch.tensor([[7], [1], [4]])
CONTEXT = Context.begin(BATCH, TIME, valid=VALID)


def head(spec):
    torch.manual_seed(0)
    return part(Head, spec, width=WIDTH, vocab=VOCAB).eval()


def vectors():
    torch.manual_seed(1)
    return torch.randn(BATCH, TIME, WIDTH)


class TestCompare:
    def test_two_texts_are_compared_channel_by_channel(self):
        """Padding belongs to neither text, and the order of the words does not matter."""
        made, x = head({"part": "compare", "classes": 3}), vectors()
        segments = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0] * 7, [0, 1, 1, 0, 1, 0, 1]])
        found = made(x, Context.begin(BATCH, TIME, valid=VALID, segments=segments))
        sums = x[0, :2].sum(0), x[0, 2:].sum(0)
        u, v = (WIDTH**0.5 * one / one.norm() for one in sums)
        torch.testing.assert_close(found[0], made.out(torch.cat((u * v, (u - v).abs(), u, v))))
        turned = x[2, [3, 2, 1, 0]], segments[2, [3, 2, 1, 0]]
        same = made(turned[0][None], Context.begin(1, 4, segments=turned[1][None]))
        torch.testing.assert_close(same[0], found[2])

    def test_the_products_are_the_cosine(self):
        made, x = head("compare"), vectors()
        made.out.weight.data = torch.tensor([[1 / WIDTH] * WIDTH + [0.0] * (3 * WIDTH)])
        made.out.bias.data.zero_()
        segments = (torch.arange(TIME) > 2).long().expand(BATCH, TIME)
        found = made(x, Context.begin(BATCH, TIME, segments=segments))
        want = torch.cosine_similarity(x[:, :3].sum(1), x[:, 3:].sum(1))
        torch.testing.assert_close(found[:, 0], want)

    def test_one_class_is_none(self):
        with pytest.raises(UserError, match="leave them out"):
            head({"part": "compare", "classes": 1})


class TestPretrain:
    spec = {
        "part": "pretrain",
        "tokens": {"part": "vocabulary", "hidden": 10, "bias": True},
        "pair": {"part": "classify", "classes": 3, "pool": "first", "hidden": 5},
    }

    def test_two_answers(self):
        """A score for every token from each position, and one for each class from the first position alone."""
        made, x = head(self.spec), vectors()
        torch.nn.init.normal_(made.tokens.bias)
        assert made(x, CONTEXT).shape == (BATCH, TIME, VOCAB)
        assert torch.equal(made(x, CONTEXT), made.tokens(x, CONTEXT))
        pair = made.pair(x, CONTEXT)
        want = made.pair.out(torch.tanh(made.pair.into(x[:, 0])))
        assert pair.shape == (BATCH, 3)
        assert torch.allclose(pair, want)
        x[:, 1:] = 0
        assert torch.equal(made.pair(x, CONTEXT), pair)

    def test_the_scores_are_a_product(self):
        """The loss can be computed without holding all logits."""
        made, x = head(self.spec), vectors()
        found, table, bias = made.linear(x, CONTEXT)
        assert torch.allclose(found @ table.T + bias, made(x, CONTEXT), atol=1e-6)

    def test_is_tied_to_the_embedding(self):
        layer = {"mixer": {"part": "attention", "pattern": "everything"}}
        spec = self.spec | {"tokens": {"part": "vocabulary", "hidden": WIDTH}}
        table = {"kind": "encoder", "width": WIDTH, "heads": 3, "layer": [layer], "tie": "target", "head": spec}
        model = regard.build({"model": table}, vocab=VOCAB)
        assert model.head.tokens.table is model.embed.table

    def test_refuses_heads_that_answer_otherwise(self):
        with pytest.raises(UserError, match="answers at every position, and pair one that answers once"):
            head({"part": "pretrain", "tokens": {"part": "classify", "classes": 2}})
        with pytest.raises(UserError, match="answers at every position, and pair one that answers once"):
            head({"part": "pretrain", "pair": {"part": "tag", "classes": 2}})


class TestEmbed:
    @pytest.mark.parametrize("pool", ["mean", "first", "max", "last"])
    @pytest.mark.parametrize("normalize", [True, False])
    def test_one_vector_of_the_real_positions(self, pool, normalize):
        x = vectors()
        found = head({"part": "embed", "pool": pool, "normalize": normalize})(x, CONTEXT)
        for row, length in enumerate(VALID.sum(1).tolist()):
            real = x[row, :length]
            want = {"mean": real.mean(0), "first": real[0], "max": real.max(0).values, "last": real[-1]}[pool]
            assert torch.allclose(found[row], want / want.norm() if normalize else want, atol=1e-6)

    def test_keeps_what_it_does_not_use(self):
        """BERT's pooler is stored with the weights and changes nothing."""
        plain, kept = head({"part": "embed"}), head({"part": "embed", "over": "summary"})
        assert torch.equal(plain(vectors(), CONTEXT), kept(vectors(), CONTEXT))
        assert list(plain.state_dict()) == []
        assert list(kept.state_dict()) == ["over.vector.out.weight", "over.vector.out.bias"]

    def test_refuses_to_pool_twice(self):
        with pytest.raises(UserError, match="over must be a head that returns a vector at every position"):
            head({"part": "embed", "over": {"part": "vector", "dim": 5}})


def test_summary_is_there_for_those_who_ask():
    made, x = head("summary"), vectors()
    assert made(x, CONTEXT) is x
    layer = made.vector.out
    assert torch.allclose(made.vector(x, CONTEXT), torch.tanh(x[:, 0] @ layer.weight.T + layer.bias), atol=1e-6)


def test_a_spare_bias_is_saved_and_not_used():
    made, x = head({"part": "vocabulary", "bias": True, "spare": True}), vectors()
    before = made(x, CONTEXT)
    made.spare.fill_(3.0)
    assert torch.equal(made(x, CONTEXT), before)
    assert "spare" in made.state_dict()
    assert "spare" not in dict(made.named_parameters())
    assert "spare" not in head("vocabulary").state_dict()


def test_a_number_after_a_layer():
    made, x = head({"part": "regress", "pool": "first", "hidden": 5, "activation": "relu"}), vectors()
    want = torch.relu(x[:, 0] @ made.into.weight.T + made.into.bias) @ made.out.weight.T + made.out.bias
    assert torch.allclose(made(x, CONTEXT), want, atol=1e-6)


class TestRotaryTable:
    def turned(self, spec, place="query"):
        torch.manual_seed(2)
        position = part(Position, spec, dim=8)
        x, at = torch.randn(BATCH, 3, TIME, 8), torch.arange(TIME)[None]
        return x, getattr(position, place)(x, at)

    @pytest.mark.parametrize("place", ["query", "key"])
    def test_begins_as_rotary(self, place):
        for base in (10000.0, 500.0):
            _, plain = self.turned({"part": "rotary", "layout": "interleaved", "base": base}, place)
            _, found = self.turned({"part": "rotary_table", "length": TIME, "base": base}, place)
            assert torch.allclose(found, plain, atol=1e-6)

    def test_values_are_turned_where_it_says_so(self):
        x, found = self.turned({"part": "rotary_table", "length": TIME}, "value")
        assert found is x
        x, found = self.turned({"part": "rotary_table", "length": TIME, "values": True}, "value")
        _, query = self.turned({"part": "rotary_table", "length": TIME}, "query")
        assert torch.equal(found, query)
        assert not torch.allclose(found, x)

    def test_the_table_is_what_turns(self):
        position = part(Position, {"part": "rotary_table", "length": 5}, dim=4)
        x, at = torch.randn(1, 1, 1, 4), torch.tensor([[3]])
        position.table[3] = torch.tensor([1.0, 0.0, 0.0, 1.0])  # a quarter turn, and none
        a, b, c, d = x.flatten().tolist()
        assert torch.allclose(position.query(x, at).flatten(), torch.tensor([-b, a, c, d]))

    def test_refuses(self):
        for spec, dim, told in (({"length": 0}, 8, "at least 1"), ({"length": 5}, 7, "an even dim")):
            with pytest.raises(UserError, match=told):
                part(Position, {"part": "rotary_table", **spec}, dim=dim)
