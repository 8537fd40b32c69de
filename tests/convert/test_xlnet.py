"""XLNet against `transformers`, live: both streams, orders, memories, padding, sentences."""

import pytest
import torch
from transformers import XLNetConfig, XLNetLMHeadModel, XLNetModel

from regard.convert.family import family_of
from regard.core import Context, Pattern, State, UserError, find
from regard.parts.objectives.permuted import initial_state, query_positions

from .live import agree, mask, near, twins

CONFIGS = {
    "three heads": {"n_head": 3, "d_model": 24, "mem_len": 4},
    "clipped": {"n_head": 2, "d_model": 28, "clamp_len": 3, "mem_len": 20, "ff_activation": "relu"},
    "untied": {"n_head": 4, "d_model": 32, "tie_word_embeddings": False, "layer_norm_eps": 1e-3},
    "one way": {"n_head": 3, "d_model": 30, "attn_type": "uni", "mem_len": 5},
}
BATCH, TIME = 2, 9


def config(name, **more):
    return XLNetConfig(**({"vocab_size": 41, "n_layer": 2, "d_inner": 20, "dropout": 0.0} | CONFIGS[name] | more))


@pytest.fixture(params=[name for name in CONFIGS if name != "one way"])
def pair(request):
    torch.manual_seed(0)
    return twins(XLNetLMHeadModel(config(request.param)))


def tokens(seed=0, time=TIME):
    return torch.randint(41, (BATCH, time), generator=torch.Generator().manual_seed(seed))


def orders(seed=3):
    """Ranks (batch, time): four places are known, the others told one after the other; and the mask that says so."""
    draw = torch.Generator().manual_seed(seed)
    ranks = (torch.rand(BATCH, TIME, generator=draw).argsort(1) - 3).clamp(min=0)
    hidden = (ranks[:, None, :] > 0) & (ranks[:, None, :] >= ranks[:, :, None])
    return ranks, hidden.float()


def asked_of(ranks):
    at = torch.stack([(row > 2).nonzero()[:, 0] for row in ranks])
    return at, torch.nn.functional.one_hot(at, TIME).float()


def scores(pair, x):
    return pair.ours.head(x, Context.begin(*x.shape[:2]))


def test_content(pair):
    ids, sentences = tokens(), (torch.arange(TIME) > 3).long().expand(BATCH, TIME)
    theirs = pair.theirs(ids, token_type_ids=sentences).logits
    agree(pair, [pair.ours(ids, segments=sentences)], [theirs])
    near(pair.ours(ids), pair.theirs(ids).logits)


def test_one_way():
    """Their own code cannot mask rows of this kind, so whole ones with a memory are compared."""
    pair = twins(XLNetLMHeadModel(config("one way")))
    first, second, none = tokens(), tokens(1), torch.zeros(BATCH, 0, dtype=torch.long)
    before = pair.theirs(first, use_mems=True)
    x, _, state = query_positions(pair.ours, first, none, initial_state(pair.ours, BATCH))
    y, _, _ = query_positions(pair.ours, second, none, state)
    near(scores(pair, x), before.logits)
    near(scores(pair, y), pair.theirs(second, mems=before.mems).logits)


def test_padding(pair):
    ids, valid = tokens(), mask([TIME, 5])
    theirs = pair.theirs(ids, attention_mask=valid.float()).logits
    agree(pair, [pair.ours(ids, valid=valid)[valid]], [theirs[valid]])


def test_two_streams_with_memory(pair):
    """Two segments: the second is asked about with what is remembered of the first."""
    first, second, (ranks, hidden) = tokens(), tokens(1), orders()
    at, mapping = asked_of(ranks)
    sentences = (torch.arange(TIME) > 4).long().expand(BATCH, TIME)
    before = pair.theirs(first, use_mems=True)
    theirs = pair.theirs(
        second, mems=before.mems, perm_mask=hidden, target_mapping=mapping, token_type_ids=sentences, use_mems=True
    )
    start = initial_state(pair.ours, BATCH)
    x, _, state = query_positions(pair.ours, first, at[:, :0], start)
    near(scores(pair, x), before.logits)
    layers = tuple((past._replace(x=past.x.detach()), *rest) for past, *rest in state.layers)
    state = State.of_new_buffers(state.lengths, layers)
    order = find(Pattern, "order")(ranks, TIME)
    _, queries, after = query_positions(pair.ours, second, at, state, pattern=order, segments=sentences)
    agree(pair, [scores(pair, queries)], [theirs.logits], limit=2e-5)
    for (past, *_), mem in zip(after.layers, theirs.mems, strict=True):
        size = min(mem.shape[0], past.x.shape[1])
        near(past.x[:, past.x.shape[1] - size :], mem.transpose(0, 1)[:, -size:], "the memory")


def test_two_streams_padded(pair):
    ids, (ranks, hidden), valid = tokens(), orders(), mask([TIME, 7])
    at = torch.tensor([[2, 6], [5, 2]])
    assert bool((ranks.gather(1, at) > 0).all())
    mapping = torch.nn.functional.one_hot(at, TIME).float()
    order = find(Pattern, "order")(ranks)
    theirs = pair.theirs(ids, attention_mask=valid.float(), perm_mask=hidden, target_mapping=mapping).logits
    _, queries, _ = query_positions(pair.ours, ids, at, initial_state(pair.ours, BATCH), valid, order)
    near(scores(pair, queries), theirs)


def test_bare():
    pair = twins(XLNetModel(config("three heads")))
    ids, valid = tokens(), mask([TIME, 4])
    x = pair.ours.hidden(ids, Context.begin(BATCH, TIME, valid=valid))
    near(x[valid], pair.theirs(ids, attention_mask=valid.float()).last_hidden_state[valid])
    assert pair.family.config(pair.family.recipe(pair.config))["architectures"] == ["XLNetModel"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"bi_data": True}, "bi_data = True"),
        ({"reuse_len": 5}, "reuse_len = 5"),
        ({"attn_type": "uni", "same_length": True}, "same_length"),
        ({"ff_activation": "gellu"}, "did you mean 'gelu'"),
    ],
)
def test_refused(more, message):
    told = {"model_type": "xlnet", "architectures": ["XLNetLMHeadModel"], **more}
    family = family_of(told)
    with pytest.raises(UserError, match=message):
        family.recipe(family.complete(told))
