"""XLNet: a prediction depends on the tokens before it in the order, not on itself or those after it."""

import pytest
import torch

import regard
from regard.core import Context, Pattern, UserError, find, watch
from regard.parts.objectives.permuted import check_model, initial_state, query_positions

TINY = ["model.width=24", "model.heads=3", "model.depth=2", "model.layer.0.feedforward.hidden=20"]
TIME = 7
RANKS = torch.tensor([[0, 3, 0, 1, 0, 4, 2], [2, 0, 1, 0, 4, 3, 0]])
AT = torch.tensor([[3, 6, 1, 5], [2, 0, 5, 4]])  # the places of rank 1, 2, 3 and 4


def model(memory=5):
    torch.manual_seed(0)
    made = regard.build("xlnet", "tiny", 31, [*TINY, f"model.layer.0.mixer.memory={memory}"]).double().eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def predictions(made, tokens, segments=None, before=None):
    state = initial_state(made, 2)
    if before is not None:
        _, _, state = query_positions(made, before, AT[:, :0], state)
    start = 0 if before is None else before.shape[1]
    order = find(Pattern, "order")(RANKS, start)
    _, x, _ = query_positions(made, tokens, AT, state, pattern=order, segments=segments)
    return made.head(x, Context.begin(2, 4))


@pytest.mark.parametrize("remembers", [False, True])
@torch.no_grad()
def test_what_a_prediction_depends_on(remembers):
    made, tokens = model(), torch.randint(31, (2, TIME))
    before = torch.randint(31, (2, 6)) if remembers else None
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(2, TIME)
    want = predictions(made, tokens, segments, before)
    for place in range(TIME):
        other = tokens.clone()
        other[:, place] = (tokens[:, place] + 1) % 31
        changed = (predictions(made, other, segments, before) - want).abs().amax(-1) > 1e-9  # (batch, asked)
        for row in range(2):
            rank = int(RANKS[row, place])
            should = [rank == 0 or rank < asked for asked in (1, 2, 3, 4)]
            assert changed[row].tolist() == should, f"place {place} of rank {rank}"


@torch.no_grad()
def test_content_sees_itself_and_nobody_sees_a_query():
    made, tokens = model(), torch.randint(31, (2, TIME))
    order = find(Pattern, "order")(RANKS)
    with watch(made.stack, "layers.0.branches.mixer.attend.weights") as seen:
        content, _, _ = query_positions(made, tokens, AT, initial_state(made, 2), pattern=order)
    weights = seen["layers.0.branches.mixer.attend.weights"][
        0
    ]  # (batch, heads, content and queries, memory and content)
    assert weights.shape == (2, 3, TIME + 4, 5 + TIME), "queries are no keys"
    own = weights[:, :, :TIME, 5:].diagonal(dim1=2, dim2=3)
    assert bool((own > 0).all())
    asked = weights[:, :, TIME:, 5:].gather(3, AT[:, None, :, None].expand(-1, 3, -1, 1))
    assert bool((asked == 0).all())
    alone, _, _ = query_positions(made, tokens, AT[:, :0], initial_state(made, 2), pattern=order)
    assert torch.allclose(content, alone, atol=1e-12), "being asked changes nothing"


@torch.no_grad()
def test_memory_is_what_went_into_each_layer():
    made, tokens = model(memory=4), torch.randint(31, (2, 9))
    valid = torch.arange(9) < torch.tensor([[9], [3]])
    with watch(made.stack, "layers.*") as seen:
        _, _, state = query_positions(made, tokens, AT[:, :0], initial_state(made, 2), valid)
    first, second = (layer[0] for layer in state.layers)
    assert torch.equal(first.x[0], made.embed.table[tokens[0, 5:]])
    assert torch.equal(second.x[0], seen["layers.0.out"][0][0, 5:9])
    assert first.at.tolist() == [[5, 6, 7, 8], [-1, 0, 1, 2]], "padding is not remembered"
    assert state.lengths.tolist() == [9, 3]


@torch.no_grad()
def test_memory_counts():
    made, tokens = model(), torch.randint(31, (2, TIME))
    one, two = torch.randint(31, (2, 6)), torch.randint(31, (2, 6))
    assert not torch.allclose(predictions(made, tokens, before=one), predictions(made, tokens, before=two))
    short = model(memory=0)
    assert torch.allclose(predictions(short, tokens, before=one), predictions(short, tokens, before=two))


@torch.no_grad()
def test_sentences_count():
    made, tokens = model(), torch.randint(31, (2, TIME))
    one, two = torch.zeros(2, TIME, dtype=torch.long), torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(2, TIME)
    assert torch.allclose(predictions(made, tokens, one), predictions(made, tokens)), "one sentence is none"
    assert torch.allclose(predictions(made, tokens, two), predictions(made, tokens, 1 - two)), "only the difference"
    assert not torch.allclose(predictions(made, tokens, two), predictions(made, tokens, one))


def test_bad_orders():
    with pytest.raises(UserError, match="belongs in a call"):
        Pattern.parse("order(3)")
    with pytest.raises(UserError, match="whole numbers"):
        find(Pattern, "order")(torch.rand(2, 3))


def test_who_cannot_be_asked():
    with pytest.raises(UserError, match="embed 'tokens' does not support query positions"):
        check_model(regard.build("xlnet", "tiny", 31, [*TINY, "model.embed=tokens"]))
    with pytest.raises(UserError, match="mixer 'attention' does not support query positions"):
        check_model(regard.build("gpt2", "tiny", 31, ["model.width=24", "model.heads=3"]))
