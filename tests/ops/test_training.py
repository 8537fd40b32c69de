"""Kernels for learning: values and gradients as torch's operations have them."""

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.native import build, train
from regard.native.decode import ACTIVATIONS
from regard.ops import dispatch
from regard.ops.activation import activation
from regard.ops.attention import _Attend, _ProjectedAttention
from regard.ops.cross_entropy import cross_entropy
from regard.ops.dropout import STEPS, _DroppedBySeed
from regard.ops.linear import _Linear
from regard.ops.mlp import _Mlp

CLOSE = {torch.float32: 2e-5, torch.float64: 1e-11}
DTYPES = list(CLOSE)


def near(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        atol = CLOSE[one.dtype] * max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


def with_gradients(run, *tensors):
    y = run(*tensors)
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
    return y.detach(), *torch.autograd.grad(y, tensors, up)


def attend(known, q, k, v, added, causal=False):
    return _Attend.apply(known, q, k, v, added, causal)


def heads(batch, places, many, dim, dtype):
    """As a map gives them: channels side by side, then heads, then places."""
    return torch.randn(batch, places, many, dim, dtype=dtype).transpose(1, 2).requires_grad_()


SIZES = [
    (3, 3, 1, 1, 5),
    (3, 3, 13, 13, 16),
    (4, 2, 7, 19, 5),
    (2, 1, 50, 50, 64),
    (2, 2, 9, 1, 24),
    (2, 2, 70, 33, 40),
]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("many", "groups", "queries", "keys", "dim"), SIZES)
@pytest.mark.parametrize("kind", ["all", "causal", "keys", "pairs", "by head", "bias"])
def test_attention(threads, known, dtype, many, groups, queries, keys, dim, kind):
    if kind == "causal" and queries != keys:
        queries = keys
    q, k, v = (
        heads(2, queries, many, dim, dtype),
        heads(2, keys, groups, dim, dtype),
        heads(2, keys, groups, dim, dtype),
    )
    added = {
        "keys": torch.rand(2, 1, 1, keys) > 0.4,
        "pairs": torch.rand(1, 1, queries, keys) > 0.4,
        "by head": torch.rand(2, many, queries, keys) > 0.4,
        "bias": torch.randn(1, many, queries, keys, dtype=dtype).masked_fill(
            torch.rand(queries, keys) > 0.7, -torch.inf
        ),
    }.get(kind)
    if added is not None:
        added[..., 0] = 0.5 if kind == "bias" else True
    causal, scale = kind == "causal", dim**-0.5
    found = with_gradients(lambda q, k, v: attend(known, q * scale, k, v, added, causal).transpose(1, 2), q, k, v)
    wanted = with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, added, is_causal=causal, enable_gqa=True), q, k, v
    )
    near(found, wanted)


def test_nothing_to_see_gives_and_teaches_nothing(known):
    q, k, v = (heads(1, 5, 2, 16, torch.float32) for _ in range(3))
    sees = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    sees[:, :, 2] = False
    y, *gradients = with_gradients(lambda q, k, v: attend(known, q, k, v, sees), q, k, v)
    assert torch.equal(y[:, 2], torch.zeros(1, 2, 16))
    assert torch.equal(gradients[0][:, :, 2], torch.zeros(1, 2, 16))
    assert all(bool(one.isfinite().all()) for one in gradients)


def test_scores_far_apart(known):
    """Neither overflow nor loss, wherever the scores lie."""
    q, k, v = (heads(1, 30, 2, 16, torch.float64) for _ in range(3))
    for shift in (-700.0, 700.0):
        added = torch.full((1, 1, 1, 30), shift, dtype=torch.float64)
        moved = with_gradients(lambda q, k, v, more=added: attend(known, 9 * q, k, v, more), q, k, v)
        near(moved, with_gradients(lambda q, k, v: attend(known, 9 * q, k, v, None), q, k, v))


def ours_or_torchs(monkeypatch, known, own):
    """Products by kernels of our own, however few the rows; or none of them."""
    monkeypatch.setattr(known, "multiplies", own)
    monkeypatch.setattr(dispatch, "LEAST_WORK", 1)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("biased", ["qkvo", "vo", ""])
@pytest.mark.parametrize("own", [True, False])
def test_attention_with_its_maps(threads, known, dtype, across, biased, own, monkeypatch):
    """Two heads of keys for four of queries, in 13 places or over 9 others, of which some are hidden."""
    ours_or_torchs(monkeypatch, known, own)
    x, memory = (torch.randn(3, many, wide, dtype=dtype) for many, wide in ((13, 20), (9, 11)))
    of = 11 if across else 20
    sizes = {"q": (4 * 6, 20), "k": (2 * 6, of), "v": (2 * 6, of), "o": (17, 4 * 6)}
    maps = [torch.randn(size, dtype=dtype) / 4 for size in sizes.values()]
    biases = {letter: torch.randn(sizes[letter][0], dtype=dtype) for letter in biased}
    sees = torch.rand(3, 1, 1, 9) > 0.4
    sees[..., 0] = True
    added, causal = (sees, False) if across else (None, True)
    tensors = [x, *([memory] if across else []), *maps, *biases.values()]
    for tensor in tensors:
        tensor.requires_grad_()

    def ours(x, *rest):
        memory, *rest = rest if across else (None, *rest)
        given = dict(zip(biased, rest[4:], strict=True))
        every = [t for letter, weight in zip(sizes, rest[:4], strict=True) for t in (weight, given.get(letter))]
        return _ProjectedAttention.apply(known, x, memory, (4, 2), 0.3, added, causal, *every)

    def torchs(x, *rest):
        memory, *rest = rest if across else (x, *rest)
        given = dict(zip(biased, rest[4:], strict=True))
        q, k, v = (
            F.linear(source, weight, given.get(letter)).unflatten(-1, (-1, 6)).transpose(1, 2)
            for source, weight, letter in zip((x, memory, memory), rest[:3], "qkv", strict=True)
        )
        y = F.scaled_dot_product_attention(q, k, v, added, is_causal=causal, scale=0.3, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(-2), rest[3], given.get("o"))

    near(with_gradients(ours, *tensors), with_gradients(torchs, *tensors))


def test_attention_teaches_only_who_learns(known, monkeypatch):
    ours_or_torchs(monkeypatch, known, True)
    x, *maps = (torch.randn(size) for size in ((2, 5, 8), *[(8, 8)] * 4))
    every = [t for weight in maps for t in (weight, None)]
    maps[1].requires_grad_()
    y = _ProjectedAttention.apply(known, x, None, (2, 2), 1.0, None, True, *every)
    (alone,) = torch.autograd.grad(y.sum(), [maps[1]])
    for tensor in (x, *maps):
        tensor.requires_grad_()
    y = _ProjectedAttention.apply(known, x, None, (2, 2), 1.0, None, True, *every)
    assert torch.equal(alone, torch.autograd.grad(y.sum(), [x, *maps])[2])


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", [True, False])
def test_a_map(threads, known, dtype, own, monkeypatch):
    ours_or_torchs(monkeypatch, known, own)
    x, weight, bias = (torch.randn(size, dtype=dtype, requires_grad=True) for size in ((2, 13, 20), (45, 20), (45,)))
    near(
        with_gradients(lambda *t: _Linear.apply(known, *t), x, weight, bias), with_gradients(F.linear, x, weight, bias)
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation_name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_feed_forward(threads, known, dtype, activation_name, bias, own, monkeypatch):
    ours_or_torchs(monkeypatch, known, own)
    x, into, out = (torch.randn(*size, dtype=dtype) for size in ((2, 13, 20), (45, 20), (17, 45)))
    x[0, 0] *= 9  # far from 0, too
    tensors = [x, into, out, *(torch.randn(n, dtype=dtype) for n in (45, 17) if bias)]
    for tensor in tensors:
        tensor.requires_grad_()
    function = activation(activation_name) if activation_name != "identity" else lambda h: h

    def ours(x, into, out, add=None, last=None):
        return _Mlp.apply(known, x, into, add, activation_name, out, last)

    def torchs(x, into, out, add=None, last=None):
        return F.linear(function(F.linear(x, into, add)), out, last)

    near(with_gradients(ours, *tensors), with_gradients(torchs, *tensors))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("many", [1, 31, 32, 33, 1000])
def test_dropout(threads, known, dtype, many):
    """What is kept forth is kept back, and nothing else; the same wherever the cores' shares begin."""
    x, stream = (torch.randn(many, dtype=dtype, requires_grad=True) for _ in range(2))
    torch.manual_seed(4)
    y, dx, dstream = with_gradients(lambda x, s: _DroppedBySeed.apply(known, x, s, STEPS // 4, 4 / 3), x, stream)
    up = torch.randn(many, generator=torch.Generator().manual_seed(3), dtype=dtype)
    kept = dx != 0
    near([dx, dstream, y], [up * kept * 4 / 3, up, (stream + x * kept * 4 / 3).detach()])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.manual_seed(4)
    assert torch.equal(_DroppedBySeed.apply(known, x, stream, STEPS // 4, 4 / 3), y)
    torch.set_num_threads(before)
    assert many < 1000 or 200 < int((~kept).sum()) < 300


def test_dropout_is_the_same_in_both_kinds_of_numbers(known):
    def kept(dtype):
        torch.manual_seed(1)
        return _DroppedBySeed.apply(known, torch.ones(999, dtype=dtype), None, STEPS // 2, 2.0) != 0

    assert torch.equal(kept(torch.float32), kept(torch.float64))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [3, 16, 61, 1000])
@pytest.mark.parametrize("bias", [True, False])
def test_powers(threads, known, dtype, words, bias):
    rows, goal = 30 * torch.randn(7, words, dtype=dtype), torch.randint(words, (7, 1))
    add = torch.randn(words, dtype=dtype) if bias else None
    logits = rows if add is None else rows + add / torch.tensor(2.0, dtype=dtype).log()
    top, mass, right = train.powers(known, made := rows.clone(), add, goal)
    e = (logits - logits.amax(1, keepdim=True)).exp2()
    near([top, mass, right, made], [logits.amax(1, keepdim=True), e.sum(1, keepdim=True), logits.gather(1, goal), e])


def test_scores_that_are_no_numbers_are_found_out():
    x, table = torch.randn(3, 4), torch.randn(50, 4)
    x[1] = torch.nan
    loss, nll = cross_entropy(x, table, None, torch.tensor([1, 2, 3]))
    assert bool(loss.isnan())
    assert bool(nll.isnan())


@pytest.mark.parametrize("name", ["transformer", "gpt2", "bert", "llama", "t5"])
def test_models_learn_the_same_without_them(name, monkeypatch):
    """Loss and gradients of a whole model, ragged rows included."""
    torch.manual_seed(0)
    model = regard.build(name, size="tiny", vocab=61).eval()
    tokens = torch.randint(4, 61, (3, 11))
    valid = torch.arange(11) < torch.tensor([[11], [4], [7]])
    more = {} if model.encoder is None else {"source": tokens[:, :9], "source_valid": valid[:, :9]}

    def gradients():
        model.zero_grad()
        model(tokens, valid, **more)[valid].square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    ran = []
    monkeypatch.setattr(
        train,
        "attention",
        lambda *given, real=train.attention, **named: ran.append(1) or real(*given, **named),
    )
    ours = gradients()
    assert ran or build.load_kernels() is None or name == "t5"  # whose biases learn
    monkeypatch.setattr(dispatch, "load_kernels", lambda: None)
    seen = len(ran)
    near(ours, gradients())
    assert len(ran) == seen


def test_plain_linears():
    """Linear maps that somebody watches, and modules that are more than linear maps, are called."""
    one, two = torch.nn.Linear(5, 8), torch.nn.Linear(8, 5)
    assert dispatch.plain_linears(one, two)
    handle = two.register_forward_hook(lambda *_: None)
    assert not dispatch.plain_linears(one, two)
    handle.remove()
    assert dispatch.plain_linears(one, two)
    assert not dispatch.plain_linears(one, torch.nn.Sequential(two))
    assert not dispatch.plain_linears(one, torch.nn.utils.parametrizations.weight_norm(two))
