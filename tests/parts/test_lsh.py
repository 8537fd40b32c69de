"""LSH attention against its definition, position by position; and what else a Reformer is made of."""

import pytest
import torch

import regard
from regard.core import Context, Mixer, Position, UserError, part, select, watch
from regard.ops import lsh
from regard.parts.mixers.lsh import MAX_SHORT_STEP
from regard.verify import laws

WIDTH, HEADS, TIME = 24, 3, 29


def make(**given):
    torch.manual_seed(1)
    spec = {"part": "lsh", "buckets": 4, "size": 3, "seed": 5, **given}
    return part(Mixer, spec, width=WIDTH, heads=HEADS).double().eval()


def inputs(time=TIME, batch=2):
    torch.manual_seed(2)
    return torch.randn(batch, time, WIDTH, dtype=torch.float64)


def sets(mixer, buckets):
    """For each position, the others that it sees in a round with these buckets (time,), from the definition."""
    rule, time = mixer.rule, len(buckets)
    order = sorted(range(time), key=lambda i: (buckets[i], i))
    chunk = {i: place // rule.size for place, i in enumerate(order)}
    seen = []
    for i in range(time):
        if rule.near:
            seen.append([j for j in range(i) if buckets[j] == buckets[i]][-rule.near :])
            continue
        near = [j for j in range(time) if -rule.after <= chunk[i] - chunk[j] <= rule.before and j != i]
        seen.append([j for j in near if buckets[j] == buckets[i] and (j < i or not rule.causal)])
    return seen


def slowly(mixer, x):
    """x (batch, time, width): softmax over the union of all rounds."""
    q, k, v = mixer.project(x)
    buckets, y = mixer.bucket_ids(q), v.clone()
    for row in range(len(x)):
        for head in range(HEADS):
            rounds = [sets(mixer, one.tolist()) for one in buckets[row, head]]
            for i in range(x.shape[1]):
                union = sorted({j for seen in rounds for j in seen[i]})
                if union:
                    weights = (k[row, head, union] @ q[row, head, i]).softmax(0)
                    y[row, head, i] = weights @ v[row, head, union]
    return mixer.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rounds": 3, "before": 2, "size": 2, "buckets": [2, 4]},
        {"cut": "chunks"},
        {"causal": False},
        {"causal": False, "rounds": 3, "after": 1, "before": 0},
    ],
    ids=str,
)
@torch.no_grad()
def test_definition(given):
    mixer, x = make(**given), inputs()
    assert laws.max_difference(mixer(x, Context.begin(2, TIME)), slowly(mixer, x)) < 1e-12


@torch.no_grad()
def test_long_steps_are_sorted_again():
    """Longer steps take another code path, and rows are at different positions."""
    mixer, time = make(rounds=3, size=5), 3 * MAX_SHORT_STEP
    x = inputs(time, 3)
    whole = mixer(x, Context.begin(3, time))
    state, begin = mixer.start(Context.begin(3, 0), time), torch.zeros(3, dtype=torch.long)
    for taken in (
        [3, 0, 40],
        [MAX_SHORT_STEP + 5, 2 * MAX_SHORT_STEP, 1],
        [2, MAX_SHORT_STEP, MAX_SHORT_STEP + 9],
        [1, 0, MAX_SHORT_STEP + 1],
    ):
        lengths = torch.tensor(taken)
        at = begin[:, None] + torch.arange(max(taken))
        columns = x.gather(1, at.clamp(max=time - 1)[..., None].expand(-1, -1, WIDTH))
        valid = torch.arange(max(taken))[None] < lengths[:, None]
        y, state = mixer.step(columns, state, Context.after(begin, max(taken), valid=valid))
        for row, length in enumerate(taken):
            first = int(begin[row])
            assert laws.max_difference(y[row, :length], whole[row, first : first + length]) < 1e-12
        begin = begin + lengths


@torch.no_grad()
def test_cost_of_long_steps():
    for length, past in ((MAX_SHORT_STEP + 7, 0), (MAX_SHORT_STEP + 7, 20)):
        finding = laws.costs(laws.Subject(make(rounds=3)), length, past)
        assert finding.holds, finding


@torch.no_grad()
def test_few_comparisons_at_once_change_nothing(monkeypatch):
    mixer, x = make(), inputs()
    state = mixer.start(Context.begin(2, 0), TIME)
    want, _ = mixer.step(x, mixer.start(Context.begin(2, 0), TIME), Context.after(torch.zeros(2).long(), TIME))
    monkeypatch.setattr(lsh, "MAX_COMPARISONS", 1)
    assert laws.max_difference(mixer.step(x, state, Context.after(torch.zeros(2).long(), TIME))[0], want) < 1e-12


@torch.no_grad()
def test_in_chunks_the_future_decides_what_is_seen():
    """Sorted chunks depend on later positions, so they do not step, and the causal default is another form."""
    x, moved = inputs(), []
    for mixer in (make(), make(cut="chunks")):
        y = [mixer(torch.cat((x[:, :20], tail), 1), Context.begin(2, TIME)) for tail in (x[:, 20:], x[:, :9])]
        moved.append(laws.max_difference(y[0][:, :20], y[1][:, :20]))
    assert moved[0] < 1e-12
    assert moved[1] > 1e-3


def test_a_decoder_of_chunks_is_refused_by_name():
    layer = {"mixer": {"part": "lsh", "buckets": 4, "size": 3, "cut": "chunks"}, "wiring": "pre"}
    table = {"kind": "decoder", "width": WIDTH, "heads": HEADS, "layer": [layer]}
    with pytest.raises(UserError, match=r"layer\[0\].mixer: .*'lsh', as it is made here, looks ahead"):
        regard.build({"vocab": 17, "model": table})
    mixer = make(cut="chunks")
    with pytest.raises(UserError, match="depend on later ones, so this lsh does not step"):
        mixer.step(inputs(), mixer.start(Context.begin(2, 0), TIME), Context.begin(2, TIME))


@torch.no_grad()
def test_alone_it_sees_itself():
    mixer, x = make(), inputs(1)
    assert laws.max_difference(mixer(x, Context.begin(2, 1)), mixer.out(mixer.v(x))) < 1e-12


@pytest.mark.parametrize("given", [{}, {"cut": "chunks", "across": True, "repeats": True}, {"causal": False}], ids=str)
def test_weights_are_what_is_applied(given):
    mixer, x = make(**given), inputs()
    found = []
    for watched in (False, True):
        mine = x.clone().requires_grad_()
        if watched:
            with watch(mixer, "weights") as seen:
                y = mixer(mine, Context.begin(2, TIME))
        else:
            y = mixer(mine, Context.begin(2, TIME))
        y.square().sum().backward()
        found.append((y.detach(), mine.grad))
    weights = seen["weights"][0].detach()
    assert weights.shape == (2, HEADS, TIME, TIME)
    assert laws.max_difference(weights.sum(-1), torch.ones(2, HEADS, TIME)) < 1e-12
    assert laws.max_difference(found[0][0], found[1][0]) < 1e-12
    assert laws.max_difference(found[0][1], found[1][1]) < 1e-9


def test_rotations_come_from_the_seed_or_are_saved(tmp_path):
    assert torch.equal(make().rotations, make().rotations)
    assert not torch.equal(make().rotations, make(seed=6).rotations)
    layer = {"mixer": {"part": "lsh", "buckets": 4, "size": 3}, "wiring": "pre"}
    table = {"kind": "decoder", "width": WIDTH, "heads": HEADS, "depth": 2, "layer": [layer]}
    model = regard.build({"vocab": 17, "model": table}).eval()
    one, two = (layer.branches["mixer"].rotations for layer in model.stack.layers)
    assert not torch.equal(one, two)
    regard.save(model, tmp_path)
    tokens = torch.randint(17, (2, TIME))
    assert torch.equal(model(tokens), regard.restore(tmp_path).eval()(tokens))


def test_no_tensor_of_all_pairs():
    mixer, time = make(size=8, rounds=1).float(), 1000
    sizes = []
    x = torch.randn(1, time, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        mixer(x, Context.begin(1, time))
    assert max(sizes) < time * time // 10


@pytest.mark.parametrize("given", [{}, {"causal": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_rows_of_padding(dtype, given):
    mixer = make(**given).to(dtype)
    x = torch.randn(3, 7, WIDTH, dtype=dtype, requires_grad=True)
    valid = torch.arange(7)[None] < torch.tensor([[7], [0], [3]])
    y = mixer(x, Context.begin(3, 7, valid=valid))
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert bool(torch.isfinite(y).all())
    assert bool(torch.isfinite(x.grad).all())
    if mixer.streams:
        steps, _ = mixer.step(x, mixer.start(Context.begin(3, 0), 7), Context.after(torch.zeros(3).long(), 7))
        assert steps.dtype == dtype


def test_too_small_a_state_grows():
    mixer, x = make(), inputs(26)
    state = select(mixer.start(Context.begin(2, 0), 5), torch.tensor([1, 0]))
    y, _ = mixer.step(x, state, Context.after(torch.zeros(2).long(), 26))
    torch.testing.assert_close(y, mixer(x, Context.begin(2, 26)))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"buckets": 5}, "buckets must be an even number"),
        ({"buckets": [4, 3]}, "buckets must be an even number"),
        ({"buckets": []}, "buckets must be an even number"),
        ({"rounds": 0}, "at least 1"),
        ({"cut": "rows"}, "cut must be 'bucket' or 'chunks'"),
        ({"across": True}, "set cut = 'chunks'"),
        ({"causal": False, "cut": "bucket"}, "set cut = 'chunks'"),
        ({"before": 0}, "before >= 1"),
    ],
)
def test_bad_arguments(given, sentence):
    with pytest.raises(UserError, match=sentence):
        make(**given)


def ours_and_plain(size):
    torch.manual_seed(3)
    chunked = part(Mixer, {"part": "chunked", "size": size, "feedforward": {"part": "mlp", "hidden": 40}}, width=WIDTH)
    return chunked.double(), chunked.double().inner


@pytest.mark.parametrize("size", [1, 4, 64])
def test_chunks_of_a_feedforward_are_the_whole(size):
    chunked, plain = ours_and_plain(size)
    context, found = Context.begin(2, TIME), []
    for mixer in (chunked, plain):
        x = inputs().requires_grad_()
        chunked.zero_grad()
        y = mixer(x, context)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad.clone() for p in chunked.parameters())])
    for one, two in zip(*found, strict=True):
        assert laws.max_difference(one, two) < 1e-12


def test_chunks_keep_no_hidden_channels():
    kept = []
    for mixer in ours_and_plain(4):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            mixer(inputs().requires_grad_(), Context.begin(2, TIME))
        kept.append(sum(sizes))
    assert kept[0] <= 2 * TIME * WIDTH < kept[1]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"size": 0}, "size must be at least 1"),
        ({"feedforward": {"part": "mlp", "norm": "batch"}}, "statistics over positions"),
        ({"feedforward": "gru"}, "treats every position by itself"),
        ({"feedforward": {"part": "mlp", "hiden": 3}}, "feedforward: .*did you mean 'hidden'"),
    ],
)
def test_bad_chunks(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        part(Mixer, {"part": "chunked", **spec}, width=WIDTH)


def test_axial_places():
    """Row by row; two places in a row differ only in the column's channels."""
    torch.manual_seed(0)
    position = part(Position, {"part": "axial", "shape": [3, 5], "dims": [7, 17]}, width=WIDTH).double()
    assert position.limit == 15
    with torch.no_grad():
        added = position.embed(torch.zeros(1, 15, WIDTH).double(), torch.arange(15)[None])[0].unflatten(0, (3, 5))
    assert torch.equal(added[..., :7], position.rows[:, None].expand(3, 5, 7))
    assert torch.equal(added[..., 7:], position.columns[None].expand(3, 5, 17))
    for given, sentence in (({"shape": [3]}, "two numbers"), ({"shape": [3, 5], "dims": [7, 7]}, "sum to the width")):
        with pytest.raises(UserError, match=sentence):
            part(Position, {"part": "axial", **given}, width=WIDTH)
