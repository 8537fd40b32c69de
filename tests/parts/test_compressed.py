"""Memory-compressed attention against its definition, position by position."""

import pytest
import torch

from regard.core import Context, Mixer, UserError, part, state_bytes, watch
from regard.verify import laws

WIDTH, HEADS, TIME = 24, 3, 13

VARIANTS = [
    {"factor": 3},
    {"factor": 3, "strict": True},
    {"factor": 4, "compress": "input", "first": "position", "strict": True},
    {"factor": 2, "compress": "input"},
    {"factor": 5, "first": "position"},
    {"factor": 20},
    {"factor": 3, "causal": False},
    {"factor": 4, "causal": False, "compress": "input", "first": "position"},
]


def make(**given):
    torch.manual_seed(1)
    mixer = part(Mixer, {"part": "compressed", **given}, width=WIDTH, heads=HEADS).double().eval()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return mixer


def slowly(mixer, x, given):
    """x (time, width): every query, every group, every head."""
    f, causal, strict = given["factor"], given.get("causal", True), given.get("strict", False)
    inside = given.get("compress") == "input"

    def squeeze(rows):  # (factor, channels)
        weight, groups = mixer.squeeze.weight, mixer.squeeze.groups
        parts = [
            sum(w[:, :, r] @ row[c] for r, row in enumerate(rows))
            for w, c in zip(weight.chunk(groups), torch.arange(rows.shape[1]).chunk(groups), strict=True)
        ]
        return torch.cat(parts) + mixer.squeeze.bias

    def mapped(row):
        return mixer.k(row), mixer.v(row)

    first = (mixer.first_key, mixer.first_value) if given.get("first") != "position" else mapped(x[0])
    memory = [(0, first)]
    for begin in range(0, len(x), f):
        rows = x[begin : begin + f]
        if len(rows) < f and causal:
            break
        sides = [rows] if inside else [mixer.k(rows), mixer.v(rows)]
        sides = [squeeze(torch.cat((side, side.new_zeros(f - len(side), side.shape[1])))) for side in sides]
        memory.append((begin + f - (0 if strict else 1), mapped(sides[0]) if inside else tuple(sides)))
    outputs = []
    for i, row in enumerate(x):
        seen = [pair for at, pair in memory if at <= i or not causal]
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in (mixer.q(row), *map(torch.stack, zip(*seen, strict=True))))
        weights = torch.einsum("hd,mhd->hm", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
        outputs.append(mixer.out(torch.einsum("hm,mhd->hd", weights, v).flatten()))
    return torch.stack(outputs)


@pytest.mark.parametrize("given", VARIANTS, ids=str)
@torch.no_grad()
def test_definition(given):
    mixer = make(**given)
    x = torch.randn(2, TIME, WIDTH, dtype=torch.float64)
    want = torch.stack([slowly(mixer, row, given) for row in x])
    assert laws.max_difference(mixer(x, Context.begin(2, TIME)), want) < 1e-12


@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_a_watched_tap_changes_nothing(given):
    """A watched tap sees the weights over the groups in order, and turns the fast path off."""
    mixer, found = make(**given), []
    x = torch.randn(2, TIME, WIDTH, dtype=torch.float64, requires_grad=True)
    for watched in (False, True):
        x.grad = None
        mixer.zero_grad()
        if watched:
            with watch(mixer) as seen:
                y = mixer(x, Context.begin(2, TIME))
            weights = seen["attend.weights"][0]
            assert weights.shape[:3] == (2, HEADS, TIME)
            assert laws.max_difference(weights.detach().sum(-1), torch.ones(2, HEADS, TIME)) < 1e-12
        else:
            y = mixer(x, Context.begin(2, TIME))
        y.square().sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in mixer.parameters()]
        found.append([y.detach(), x.grad, *grads])
    for one, two in zip(*found, strict=True):
        assert laws.max_difference(one, two) < 1e-9


def test_no_tensor_of_all_pairs():
    mixer, time = make(factor=3).float(), 600
    sizes = []
    x = torch.randn(1, time, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        mixer(x, Context.begin(1, time))
    assert max(sizes) < time * time // 3


def test_state_holds_groups():
    mixer, context = make(factor=4), Context.begin(2, 0)
    one = 2 * 2 * WIDTH * 8  # keys and values, two rows, a slot
    grows = [state_bytes(mixer.start(context, capacity)) for capacity in (16, 19, 20)]
    assert grows[0] == grows[1] == grows[2] - one


def test_too_small_a_state_grows():
    mixer, x = make(factor=3), torch.randn(2, 30, WIDTH, dtype=torch.float64)
    y, _ = mixer.step(x, mixer.start(Context.begin(2, 0), 5), Context.after(torch.zeros(2).long(), 30))
    torch.testing.assert_close(y, mixer(x, Context.begin(2, 30)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_rows_of_padding(dtype, causal):
    mixer = make(factor=3, causal=causal).to(dtype)
    x = torch.randn(3, 7, WIDTH, dtype=dtype, requires_grad=True)
    valid = torch.arange(7)[None] < torch.tensor([[7], [0], [3]])
    y = mixer(x, Context.begin(3, 7, valid=valid))
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert bool(torch.isfinite(y).all())
    assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"factor": 0}, "factor must be at least 1"),
        ({"compress": "values"}, "compress must be 'keys' or 'input'"),
        ({"first": "null"}, "first must be 'learned' or 'position'"),
    ],
)
def test_bad_arguments(given, sentence):
    with pytest.raises(UserError, match=sentence):
        make(**given)


def test_both_directions_do_not_step():
    mixer = make(causal=False)
    with pytest.raises(UserError, match="does not step"):
        mixer.step(torch.randn(2, 3, WIDTH), mixer.start(Context.begin(2, 0), 3), Context.begin(2, 3))
    with pytest.raises(UserError, match="cannot follow a pattern"):
        mixer(torch.randn(2, 3, WIDTH), Context.begin(2, 3, pattern=mixer.pattern))
