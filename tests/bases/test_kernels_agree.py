"""Every kernel against the reference: outputs and gradients, over patterns, lengths, padding, heads and biases."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from regard.bases import Attend, AttentionMask, blocks, dense, layout, reference
from regard.core import Pattern, Position, Score, Tap, UserError, part
from regard.ops.join import merge
from regard.parts.patterns.matrix import Matrix
from regard.parts.patterns.segment import Segment

PATTERNS = (
    "causal",
    "causal & window(5)",
    "everything",
    "window(4)",
    "causal & (window(3) | first(2) | stride(7))",
    "causal & (window(9) | first(4) | random_blocks(2, 4))",
    "global_tokens(2) | window(3)",
    "causal & fixed(8, 2)",
    "causal & heads(window(3), stride(4), everything)",
    "causal & fixed(6, 1, 2)",
    "causal & (window(6) | stride(9))",  # in two parts, joined
    "dilated(4, 5) & ~window(1)",  # so that some see nothing in one part or in both
    "causal & ~window(4)",  # the first queries have nothing to see
)
LENGTHS = (1, 7, 37, 130, 257)


class Slope(Position):
    """Like ALiBi with learned slopes."""

    relative = True

    def __init__(self, heads: int):
        super().__init__()
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.9, heads, dtype=torch.float64))

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        return -(query_at - key_at).abs() * self.slopes.to(q.dtype)[:, None, None]


class Asking(Position):
    """Adds what a learned map of the query says about the place of the key, and a part that nobody learns."""

    needs_query = True

    def __init__(self, dim: int):
        super().__init__()
        self.map = nn.Parameter(torch.randn(dim, dtype=torch.float64))
        self.still = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        return (q @ self.map)[..., None] * torch.cos(key_at * self.still + query_at)


class Case:
    """Random q, k, v and what comes back from a kernel."""

    def __init__(self, pattern: Pattern | str, length: int, heads: int = 6, kv_heads: int = 6, batch: int = 2):
        torch.manual_seed(length)
        self.pattern = part(Pattern, pattern)
        self.q = torch.randn(batch, heads, length, 5, dtype=torch.float64)
        self.k = torch.randn(batch, kv_heads, length, 5, dtype=torch.float64)
        self.v = torch.randn(batch, kv_heads, length, 3, dtype=torch.float64)
        self.plain = torch.randn_like(self.q)
        at = torch.arange(length)[None]
        self.see = AttentionMask(self.pattern, at, at, from_start=True)
        self.position = Position()

    def pad(self, *lengths: int) -> "Case":
        key_at = torch.where(self.see.key_at < torch.tensor(lengths)[:, None], self.see.key_at, -1)
        self.see = self.see._replace(key_at=key_at, holes=True)
        return self

    def place(self, position: Position) -> "Case":
        self.position = position
        return self

    def run(self, kernel, dtype: torch.dtype = torch.float64, **more) -> list[Tensor]:
        """The output, and the gradients of q, k, v, the plain query and all that the position learns."""
        tensors = [t.to(dtype).requires_grad_() for t in (self.q, self.k, self.v, self.plain)]
        q, k, v, plain = tensors
        if kernel is reference:
            y = reference.attend(q, k, v, self.see, Score(), self.position, plain, 0.0, Tap())
        else:
            y = kernel.attend(q, k, v, self.see, self.position, plain, 0.0, **more)
        torch.manual_seed(0)
        cotangent = torch.randn(y.shape, dtype=torch.float64).to(dtype)
        wanted = tensors + [p for p in self.position.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(y, wanted, cotangent, allow_unused=True)
        return [y.detach()] + [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, wanted, strict=True)]


def check(case: Case, kernel, **more) -> None:
    want, have = case.run(reference), case.run(kernel, **more)
    assert len(want) == len(have)
    for number, (one, two) in enumerate(zip(have, want, strict=True)):
        assert one.shape == two.shape
        assert torch.allclose(one, two, rtol=1e-10, atol=1e-11), f"tensor {number}: {(one - two).abs().max():.1e}"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_blocks(pattern, length):
    check(Case(pattern, length), blocks, block=16)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_sdpa(pattern, length):
    check(Case(pattern, length), dense)


@pytest.mark.pairwise
@pytest.mark.parametrize("kernel", [blocks, dense])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_shared_key_heads(pattern, kv_heads, kernel):
    check(Case(pattern, 37, kv_heads=kv_heads), kernel, **({"block": 8} if kernel is blocks else {}))


@pytest.mark.parametrize("kernel", [blocks, dense])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_padding(pattern, kernel):
    """Rows of different lengths, one of them empty."""
    more = {"block": 8} if kernel is blocks else {}
    check(Case(pattern, 37, batch=3).pad(37, 11, 0), kernel, **more)


def positions(heads: int, dim: int) -> dict[str, Position]:
    named = {name: part(Position, name, width=heads * dim, heads=heads, dim=dim) for name in ("t5", "alibi")}
    return named | {"slope": Slope(heads), "asking": Asking(dim)}


@pytest.mark.pairwise
@pytest.mark.parametrize("kernel", [blocks, dense])
@pytest.mark.parametrize("name", sorted(positions(6, 5)))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_bias(pattern, name, kernel):
    more = {"block": 8} if kernel is blocks else {}
    check(Case(pattern, 37, kv_heads=2, batch=3).pad(37, 20, 5).place(positions(6, 5)[name].double()), kernel, **more)


def test_transformer_xl():
    """Learned, asks the query, and wants an even width."""
    position = part(Position, "transformer_xl", width=30, heads=6, dim=5).double()
    check(Case("causal & (window(9) | first(4))", 37).place(position), blocks, block=8)


def batch_patterns(length: int) -> dict[str, Pattern]:
    torch.manual_seed(3)
    ids = torch.randint(0, 9, (3, length)).sort(1).values
    graph = torch.rand(3, length, length) < 0.1
    return {
        "documents": part(Pattern, "causal") & Segment(ids),
        "near in documents": part(Pattern, "causal & (window(9) | first(2))") & Segment(ids),
        "documents or near": Segment(ids) | part(Pattern, "window(3)"),
        "no documents": ~Segment(ids),
        "by head": part(Pattern, "heads(window(4), stride(3))") & Segment(ids),
        "documents or by head": Segment(ids) | part(Pattern, "heads(window(4), stride(3))"),
        "graphs": Matrix(graph),
        "one graph": Matrix(graph[0]),
    }


@pytest.mark.pairwise
@pytest.mark.parametrize("kernel", [blocks, dense])
@pytest.mark.parametrize("name", sorted(batch_patterns(3)))
@pytest.mark.parametrize("padded", [False, True])
def test_rows_differ(name, padded, kernel):
    """Patterns that hold a batch's own data."""
    case = Case(batch_patterns(61)[name], 61, batch=3, kv_heads=2)
    check(case.pad(61, 40, 8) if padded else case, kernel, **({"block": 8} if kernel is blocks else {}))


@pytest.mark.parametrize("heads", [1, 2, 5, 7])
def test_heads_that_do_not_come_out_even(heads):
    check(Case("causal & heads(window(3), stride(4), everything)", 37, heads=heads, kv_heads=1), blocks, block=8)


@pytest.mark.parametrize("kernel", [blocks, dense])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nothing_to_see(kernel, dtype):
    """Zeros and no gradient, instead of NaN."""
    hole = Case("causal & ~window(4)", 130, batch=2).pad(130, 0)
    y, dq, dk, dv, *_ = hole.run(kernel, dtype)
    assert all(bool(t.isfinite().all()) for t in (y, dq, dk, dv))
    for blind in (y[:, :, :4], y[1], dq[:, :, :4], dq[1], dk[1], dv[1]):
        assert not bool(blind.any())
    assert bool(y[0, :, 4:].any())


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 0.08)])
def test_other_precisions(dtype, near):
    case = Case("causal & (window(20) | first(2))", 257, kv_heads=2).place(Slope(6))
    for one, two in zip(case.run(blocks, dtype, block=16), case.run(reference), strict=True):
        assert (one.double() - two).abs().max() <= near * two.abs().max()


def test_strides():
    """As the mixer hands them over: (batch, time, heads, dim) with two axes swapped."""
    case = Case("causal & (window(9) | first(3))", 37, kv_heads=2)
    want = case.run(blocks, block=8)
    for name in ("q", "k", "v", "plain"):
        setattr(case, name, getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2))
    for one, two in zip(case.run(blocks, block=8), want, strict=True):
        assert torch.allclose(one, two, rtol=1e-12, atol=1e-12)


def test_masks_made_again(monkeypatch):
    """A plan that is too large to be remembered whole gives the same."""
    monkeypatch.setattr(layout, "MAX_CACHED_PAIRS", 300)
    layout._plan.cache_clear()
    for pattern in ("causal & heads(window(3), stride(4))", "window(5) | global_tokens(1)", "window(4) | stride(5)"):
        assert layout.plan(part(Pattern, pattern), 37, 8, torch.device("cpu"))[0][0].query_blocks[-1].hidden is None
        check(Case(pattern, 37, kv_heads=2).pad(37, 9), blocks, block=8)
    layout._plan.cache_clear()


@pytest.mark.parametrize("kernel", [blocks, dense, reference])
def test_dropout_keeps_the_mean(kernel):
    case = Case("causal & (window(4) | first(1))", 13, heads=2, kv_heads=1, batch=400)
    for tensor in (case.q, case.k, case.v):
        tensor[1:] = tensor[:1]  # so that the rows of the batch are draws of the same
    want = case.run(reference)[0][:1]
    if kernel is reference:
        y = reference.attend(case.q, case.k, case.v, case.see, Score(), case.position, case.q, 0.3, Tap())
    else:
        y = kernel.attend(case.q, case.k, case.v, case.see, case.position, case.q, 0.3)
    spread = y.std(0)
    assert bool((spread[:, 1:] > 0.01).all())
    assert bool(((y.mean(0) - want[0]).abs() <= 5 * spread / 20 + 1e-9).all())


def test_dropout_has_the_right_gradient():
    """Of the weights that were kept: the backward draws them again."""
    case = Case("causal & heads(window(3), first(2))", 11, heads=2, kv_heads=1).place(Asking(5))
    tensors = [t.requires_grad_() for t in (case.q, case.k, case.v, case.plain, case.position.map)]

    def run(q, k, v, plain, _):
        torch.manual_seed(5)
        return blocks.attend(q, k, v, case.see, case.position, plain, 0.4, block=4)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_dropout_differs_from_call_to_call():
    case = Case("causal & window(4)", 13)
    one, two = (blocks.attend(case.q, case.k, case.v, case.see, case.position, case.q, 0.3) for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "blocks"])
def test_dropout_is_for_training(kernel):
    case = Case("causal & window(4)", 13)
    attend = Attend(kernel, 0.5)

    def run() -> Tensor:
        return attend(case.q, case.k, case.v, case.see, Score(), case.position)

    assert not torch.allclose(run(), case.run(reference)[0])
    attend.eval()
    assert torch.allclose(run(), case.run(reference)[0])


@dataclass(frozen=True)
class Spy(Pattern):
    """A window that notes how many pairs it is asked about at once."""

    size: int
    asked = []

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        allowed = (query_at - key_at).abs() < self.size
        self.asked.append(allowed.numel())
        return allowed


def test_plan_is_made_in_pieces_and_once():
    spy = Spy(5)
    device = torch.device("cpu")
    (((_, looks),),) = layout.plan(spy, 1000, 16, device)
    assert max(Spy.asked) <= 16 * 1024
    times = len(Spy.asked)
    assert [look.shape for look in layout.plan(spy, 990, 16, device)[0][0].query_blocks[:62]] == [
        *[look.shape for look in looks[:61]],
        (14, 18),
    ]
    assert len(Spy.asked) == times
    assert looks[5].keys == slice(76, 100)
    assert looks[6].hidden.data_ptr() == looks[5].hidden.data_ptr()  # what is alike is kept once
    assert layout.share(spy, 1000, 16, device) == pytest.approx(0.024, rel=0.01)


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("causal & stride(128)", 128),
        ("causal & (window(128) | stride(128))", 128 + 255),
        ("causal & dilated(64, 16)", 192),
        ("dilated(100, 7)", 328),
        ("causal & fixed(128, 1)", 256),
    ],
)
def test_kin_are_compared_together(pattern, most):
    """What is far but regular costs what it should: so many keys per query at 4096, whatever order they stand in."""
    plans = layout.plan(part(Pattern, pattern), 4096, 128, torch.device("cpu"))
    assert sum(cover.pairs for covers in plans for cover in covers) / 4096 <= most


def test_covers_share_no_pair():
    for pattern in ("causal & (window(6) | stride(9) | dilated(3, 4))", "window(3) | stride(5)"):
        seen = torch.zeros(301, 301, dtype=torch.long)
        ((*covers,),) = layout.plan(part(Pattern, pattern), 301, 16, torch.device("cpu"))
        assert len(covers) == 2
        for _, looks in covers:
            for look in looks:
                queries, keys = (at.flatten() for at in look.places(torch.device("cpu")))
                seen[queries[:, None], keys] += ~look.hidden[0, 0]
        assert torch.equal(seen, part(Pattern, pattern).mask(301)[0].long())


@pytest.mark.parametrize("learned", [True, False])
def test_joined_parts(learned):
    """As often as a key stands in a part, so often it counts; a query without a key in any part reads nothing."""
    case = Case("causal", 37)
    sees = [case.see._replace(pattern=part(Pattern, text)) for text in ("causal & window(5) & ~window(1)", "stride(4)")]
    sees.append(case.see._replace(pattern=part(Pattern, "causal & ~everything")))
    tensors = [t.requires_grad_() for t in (case.q, case.k, case.v)]
    parts = [blocks.attend_partially(*tensors, see, Position(), case.q, 0.0, block=8) for see in sees]
    y = merge(parts, learned).y
    counts = sum(see.pattern.mask(37)[0].double() for see in sees)
    want = (case.q @ case.k.mT + counts.log()).softmax(-1) @ case.v
    assert torch.allclose(y, want, rtol=1e-10, atol=1e-11)
    ours, theirs = (torch.autograd.grad(out.sin().sum(), tensors) for out in (y, want))
    same = [torch.allclose(one, two, rtol=1e-9, atol=1e-10) for one, two in zip(ours, theirs, strict=True)]
    assert same == [learned, learned, True]  # values are read alike, whatever the shares learn
    assert not merge(parts[2:] * 2).y.any()


def test_exchanged_weights_are_refused():
    case = Case("causal & window(4)", 13).place(Slope(6))
    q = case.q.requires_grad_()
    y = blocks.attend(q, case.k, case.v, case.see, case.position, q, 0.0)
    case.position.slopes = nn.Parameter(torch.ones(6, dtype=torch.float64))
    with pytest.raises(UserError, match="replaced since"):
        y.sum().backward()


class Wave(Position):
    """Learned, of the key's place as it is given: autograd has to remember that place."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.ones((), dtype=torch.float64))

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        return torch.cos(key_at * self.rate)


def test_made_in_inference_and_met_in_training():
    position = Wave()
    case = Case("causal & (window(9) | first(5))", 37).place(position)
    layout._plan.cache_clear()
    with torch.inference_mode():
        blocks.attend(case.q, case.k, case.v, case.see, position, case.plain, 0.0, block=8)
    check(case, blocks, block=8)


def test_autocast():
    case = Case("causal & window(40)", 257, kv_heads=2)
    attend = Attend("blocks")
    q, k, v = (t.float().requires_grad_() for t in (case.q, case.k, case.v))
    with torch.autocast("cpu", torch.bfloat16):
        y = attend(q, k, v, case.see, Score(), case.position)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert q.grad.dtype == torch.float32
    assert (y.double() - case.run(reference)[0]).abs().max() < 0.1
