"""What the laws do not cover of mixers other than attention: final states, alignments, definitions, bad input."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.bases.recurrent import RecurrentState
from regard.core import Context, Memory, Mixer, Model, Place, UserError, part, select, watch
from regard.verify import laws

PLACE = Place(encoder=1, decoder=1, memory=10)


def mixer(spec: dict, width: int = 12, heads: int = 3) -> Mixer:
    return part(Mixer, spec, width=width, heads=heads, place=PLACE)


def ragged(lengths: tuple[int, ...], time: int) -> torch.Tensor:
    return torch.arange(time) < torch.tensor(lengths)[:, None]


def seq2seq(encoder: list, decoder: dict) -> Model:
    return Model(
        kind="encoder-decoder",
        width=12,
        vocab=31,
        encoder={"depth": len(encoder), "layer": [{"mixer": e, "wiring": "plain"} for e in encoder]},
        decoder={"layer": {"mixer": decoder, "wiring": "plain"}},
    )


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("layers", [1, 3])
def test_last_states_are_those_of_the_row_alone(name, layers):
    """Both directions, padding or not, in float32 where torch has another kernel: [forward; backward] a layer."""
    torch.manual_seed(0)
    ours = mixer({"part": name, "hidden": 5, "layers": layers, "both": True})
    x, lengths = torch.randn(3, 7, 12), (7, 1, 4)
    context = Context.begin(3, 7, valid=ragged(lengths, 7))
    _, last = ours.step(x, ours.start(context, 7), context)
    for row, length in enumerate(lengths):
        _, after = ours.cells.inner(x[row : row + 1, :length])
        for state, expected in zip(last, after if name == "lstm" else (after,), strict=False):
            assert state.shape == (3, layers, 10)
            torch.testing.assert_close(state[row], expected[:, 0].reshape(layers, 10))


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_ragged_steps_in_float32(name):
    torch.manual_seed(0)
    ours = mixer({"part": name, "hidden": 5, "layers": 2})
    x = torch.randn(2, 6, 12)
    whole = ours(x, Context.begin(2, 6))
    state = ours.start(Context.begin(2, 0), 6)
    at = torch.zeros(2, dtype=torch.long)
    pieces = [[], []]
    for taken in ((2, 0), (1, 3), (0, 1), (3, 2)):
        columns = torch.stack([x[row, (at[row] + torch.arange(3)).clamp(max=5)] for row in range(2)])
        y, state = ours.step(columns, state, Context.after(at, 3, valid=ragged(taken, 3)))
        at = at + torch.tensor(taken)
        for row in range(2):
            pieces[row].append(y[row, : taken[row]])
    for row in range(2):
        torch.testing.assert_close(torch.cat(pieces[row]), whole[row])


def test_decoder_begins_with_the_encoders_last_states():
    """Layers of one mixer and mixers of several layers are the same to the decoder: the topmost come last."""
    torch.manual_seed(0)
    bottom, top = {"part": "lstm", "hidden": 3, "both": True}, {"part": "lstm", "hidden": 3, "layers": 2, "both": True}
    model = seq2seq([bottom, top], {"part": "lstm", "hidden": 6, "layers": 3, "begin": "memory"})
    memory = model.encode(torch.randint(31, (2, 5)))
    assert [last.hidden.shape for last in memory.final_states] == [(2, 1, 6), (2, 2, 6)]
    (state,) = model.start(2, 4, memory=memory).layers[0]
    for ours, pieces in zip(state, zip(*memory.final_states, strict=True), strict=True):
        assert torch.equal(ours, torch.cat(pieces, 1))
    short = mixer({"part": "gru", "hidden": 6, "layers": 2, "begin": "memory"})
    first = short.start(Context.begin(2, 0, memory=memory), 4)
    assert torch.equal(first.hidden, memory.final_states[1].hidden)  # the top two of three
    assert first.cell is None


@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        ("lstm", {"part": "lstm", "begin": "memory"}),
        ("gru", {"part": "gru", "begin": "memory"}),
        ("lstm", {"part": "luong", "feed": False}),
        ("gru", {"part": "luong", "cell": "gru"}),
    ],
)
def test_laws_of_models_that_hand_over_states(name, decoder):
    torch.manual_seed(0)
    encoder = {"part": name, "hidden": 3, "layers": 2, "both": True}
    for finding in laws.check(seq2seq([encoder], {**decoder, "hidden": 6, "layers": 2})):
        assert finding.holds, f"{finding.law}: {finding.worst:.2e} > {finding.limit:.0e} ({finding.detail})"


@pytest.mark.parametrize(
    ("encoder", "decoder", "words"),
    [
        ({"part": "lstm", "hidden": 5}, {"part": "luong", "hidden": 6}, "1 layers of width 5"),
        ({"part": "lstm", "hidden": 6}, {"part": "luong", "hidden": 6, "layers": 2}, "2 layers of width 6"),
        ({"part": "gru", "hidden": 6}, {"part": "luong", "hidden": 6}, "states of a gru"),
        ({"part": "gru", "hidden": 6}, {"part": "lstm", "hidden": 6, "begin": "memory"}, "states of a gru"),
    ],
)
def test_last_states_that_do_not_fit(encoder, decoder, words):
    model = seq2seq([encoder], decoder)
    with pytest.raises(UserError, match=words):
        model(torch.randint(31, (2, 3)), source=torch.randint(31, (2, 5)))
    decoder = decoder | {"begin": "zeros"}
    assert seq2seq([encoder], decoder)(torch.randint(31, (2, 3)), source=torch.randint(31, (2, 5))).shape == (2, 3, 31)


def test_bahdanau_begins_with_both_ends_or_the_mean():
    torch.manual_seed(0)
    model = seq2seq([{"part": "gru", "hidden": 4, "layers": 2, "both": True}], {"part": "bahdanau", "hidden": 7})
    valid = ragged((5, 2), 5)
    memory = model.encode(torch.randint(31, (2, 5)), valid)
    ours = model.stack.layers[0].branches["mixer"]
    start = ours.start(Context.begin(2, 0, memory=memory), 3)
    ends = torch.stack([torch.cat((memory.x[row, n - 1, :4], memory.x[row, 0, 4:])) for row, n in enumerate((5, 2))])
    torch.testing.assert_close(start.hidden, torch.tanh(ours.first(ends)))  # the top layer's ends are in its output
    means = torch.stack([memory.x[row, :n].mean(0) for row, n in enumerate((5, 2))])
    start = ours.start(Context.begin(2, 0, memory=Memory(memory.x, valid)), 3)
    torch.testing.assert_close(start.hidden, torch.tanh(ours.first(means)))


def test_bahdanau_wants_the_recurrent_mixer_last():
    model = seq2seq([{"part": "gru", "hidden": 4}, {"part": "gru", "hidden": 9}], {"part": "bahdanau"})
    memory = model.encode(torch.randint(31, (2, 5)))
    with pytest.raises(UserError, match="last state has width 4 and its output 9"):
        model(torch.randint(31, (2, 3)), memory=memory._replace(final_states=memory.final_states[:1]))


DECODERS = [
    {"part": "bahdanau", "hidden": 7, "readout": 5},
    {"part": "luong", "hidden": 7},
    {"part": "luong", "hidden": 7, "cell": "gru", "score": "dot", "feed": False},
    {"part": "luong", "hidden": 7, "score": "additive", "layers": 2},
]


@pytest.mark.parametrize("spec", DECODERS)
def test_nobody_looks_at_a_padded_source(spec):
    torch.manual_seed(0)
    ours = mixer(spec)
    x, source, valid = torch.randn(2, 4, 12), torch.randn(2, 6, 10), ragged((6, 3), 6)
    with watch(ours, "weights") as seen:
        y = ours(x, Context.begin(2, 4, memory=Memory(source, valid)))
    (weights,) = seen["weights"]
    assert weights.shape == (2, 1, 4, 6)
    assert bool((weights[1, :, :, 3:] == 0).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, 4))
    assert float(weights.detach().std(2).mean()) > 1e-5  # the four positions look differently
    other = torch.where(valid[..., None], source, 1e3 * torch.randn_like(source))
    torch.testing.assert_close(ours(x, Context.begin(2, 4, memory=Memory(other, valid))), y)
    alone = ours(x[1:], Context.begin(1, 4, memory=Memory(source[1:, :3])))
    torch.testing.assert_close(alone, y[1:])


@pytest.mark.parametrize("spec", DECODERS)
def test_alignments_of_steps_are_those_of_the_whole(spec):
    torch.manual_seed(0)
    ours = mixer(spec)
    x, memory = torch.randn(2, 5, 12), Memory(torch.randn(2, 6, 10))
    with watch(ours, "weights") as whole:
        ours(x, Context.begin(2, 5, memory=memory))
    rows = torch.tensor([1, 0, 1])
    with watch(ours, "weights") as steps:
        _, state = ours.step(x[:, :2], ours.start(Context.begin(2, 0, memory=memory), 5), Context.begin(2, 2))
        context = Context.after(torch.full((3,), 2), 3)  # the memory is not given again
        ours.step(x[rows, 2:], select(state, rows), context)
    first, second = steps["weights"]
    torch.testing.assert_close(torch.cat((first[rows], second), 2), whole["weights"][0][rows])


@pytest.mark.parametrize("spec", DECODERS)
def test_a_watcher_may_replace_the_weights(spec):
    """With all the weight on one position, the rest of the source does not matter."""
    torch.manual_seed(0)
    ours = mixer({**spec, "begin": "zeros"} if spec["part"] == "luong" else spec)
    x, source = torch.randn(2, 4, 12), torch.randn(2, 6, 10)

    def only_the_second(name, weights):
        return F.one_hot(torch.ones(weights.shape[:3], dtype=torch.long), weights.shape[3]).to(weights)

    def run(memory):
        finals = (RecurrentState(torch.ones(2, 1, 10), None),)
        return ours(x, Context.begin(2, 4, memory=Memory(memory, final_states=finals)))

    other = torch.cat((torch.randn(2, 1, 10), source[:, 1:2], torch.randn(2, 4, 10)), 1)
    assert not torch.allclose(run(source), run(other))
    with watch(ours, "weights", only_the_second):
        torch.testing.assert_close(run(source), run(other))


def test_bahdanau_hands_on_everything_or_its_maxout():
    torch.manual_seed(0)
    context = Context.begin(2, 3, memory=Memory(torch.randn(2, 6, 10)))
    x = torch.randn(2, 3, 12)
    ours, small = mixer({"part": "bahdanau", "hidden": 7}), mixer({"part": "bahdanau", "hidden": 7, "readout": 4})
    small.load_state_dict(ours.state_dict(), strict=False)
    y = ours(x, context)
    assert y.shape == (2, 3, 7 + 10 + 12)
    assert torch.equal(y[..., 17:], x)
    doubled = small.readout(y)
    torch.testing.assert_close(small(x, context), torch.maximum(doubled[..., ::2], doubled[..., 1::2]))


def test_decoders_need_a_memory():
    for name in ("bahdanau", "luong"):
        ours = mixer({"part": name})
        with pytest.raises(UserError, match=f"{name} needs an encoder"):
            ours(torch.randn(2, 3, 12), Context.begin(2, 3))
        with pytest.raises(UserError, match=f"{name} was made for a memory of width 10, not 11"):
            ours(torch.randn(2, 3, 12), Context.begin(2, 3, memory=Memory(torch.randn(2, 6, 11))))


def naive(u, kernels, before):
    """u (time, width), kernels (time, width, size): position t takes kernels[t, :, k] * u[t + k - before]."""
    y = torch.zeros_like(u)
    for t in range(len(u)):
        for k in range(kernels.shape[-1]):
            if 0 <= t + k - before < len(u):
                y[t] += kernels[t, :, k] * u[t + k - before]
    return y


@pytest.mark.parametrize("kind", ["depthwise", "lightweight", "dynamic"])
@pytest.mark.parametrize(("size", "causal"), [(4, True), (5, False), (4, False), (11, True), (11, False)])
def test_convolution_is_its_definition(kind, size, causal):
    torch.manual_seed(size)
    spec = {"part": "convolution", "kind": kind, "size": size, "causal": causal, "into": "none", "out": False}
    ours = mixer(spec)
    x = torch.randn(1, 7, 12)
    if kind == "dynamic":
        kernels = ours.kernel(x[0]).unflatten(-1, (3, size)).softmax(-1).repeat_interleave(4, 1)
    elif kind == "lightweight":
        kernels = ours.kernel.weight[:, 0].softmax(-1).repeat_interleave(4, 0).expand(7, 12, size)
    else:
        kernels = ours.kernel.weight[:, 0].expand(7, 12, size)
    expected = naive(x[0], kernels, size - 1 if causal else (size - 1) // 2)
    torch.testing.assert_close(ours(x, Context.begin(1, 7))[0], expected)


def test_gated_convolution_and_the_maps_around():
    torch.manual_seed(0)
    ours = mixer({"part": "convolution", "kind": "gated", "size": 3, "into": "glu"})
    x = torch.randn(2, 5, 12)
    one, two = ours.into(x).chunk(2, -1)
    u = F.pad((one * two.sigmoid()).mT, (2, 0))
    value, gate = ours.kernel(u).mT.chunk(2, -1)
    torch.testing.assert_close(ours(x, Context.begin(2, 5)), ours.out(value * gate.sigmoid()))


def test_padding_is_zero_at_the_convolution_itself():
    """Padding is masked after the input projection, not before, since its bias would remain."""
    torch.manual_seed(0)
    ours = mixer({"part": "convolution", "kind": "lightweight", "size": 5, "causal": False})
    nn.init.normal_(ours.into.bias)
    x = torch.randn(1, 7, 12)
    padded = ours(x, Context.begin(1, 7, valid=ragged((4,), 7)))[:, :4]
    torch.testing.assert_close(padded, ours(x[:, :4], Context.begin(1, 4)))


def test_kernel_dropout_only_in_training():
    ours = mixer({"part": "convolution", "kind": "dynamic", "size": 3, "kernel_dropout": 0.5})
    x, context = torch.randn(1, 7, 12), Context.begin(1, 7)
    assert not torch.equal(ours(x, context), ours(x, context))
    ours.eval()
    assert torch.equal(ours(x, context), ours(x, context))


def test_mean():
    x, valid = torch.randn(2, 5, 12), ragged((5, 2), 5)
    past = mixer({"part": "mean"})(x, Context.begin(2, 5, valid=valid))
    torch.testing.assert_close(past[0, 3], x[0, :4].mean(0))
    torch.testing.assert_close(past[1, 1], x[1, :2].mean(0))
    whole = mixer({"part": "mean", "causal": False})(x, Context.begin(2, 5, valid=valid))
    assert whole.shape == x.shape
    torch.testing.assert_close(whole[1, 0], x[1, :2].mean(0))


def test_split_gives_each_side_its_channels():
    torch.manual_seed(0)
    spec = {"part": "split", "left": {"part": "lstm", "hidden": 5}, "right": "mean", "share": 0.25}
    ours = mixer(spec)
    assert (ours.left.width, ours.right.width, ours.out_width) == (3, 9, 14)
    x, context = torch.randn(2, 5, 12), Context.begin(2, 5)
    y = ours(x, context)
    torch.testing.assert_close(y[..., :5], ours.left(x[..., :3], context))
    torch.testing.assert_close(y[..., 5:], ours.right(x[..., 3:], context))
    heads = {"left": {"part": "convolution", "heads": 2}, "right": "convolution", "share": 0.5}
    sides = mixer({"part": "split", **heads}, width=12)
    assert (sides.left.heads, sides.right.heads) == (2, 3)
    assert not mixer({**spec, "right": {"part": "mean", "causal": False}}).streams


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lstm", ("n·d²", "n", "n")),
        ("gru", ("n·d²", "n", "n")),
        ("bahdanau", ("n·d² + n²·d", "n", "n")),
        ("luong", ("n·d² + n²·d", "n", "n")),
        ("mean", ("n·d", "1", "1")),
        ({"part": "convolution", "kind": "gated", "size": 5}, ("5·n·d²", "1", "n/5")),
        ({"part": "convolution", "kind": "depthwise", "size": 5, "into": "none"}, ("5·n·d + n·d²", "1", "n/5")),
        ({"part": "split", "left": "mean", "right": "gru"}, ("n·d + n·d²", "max(1, n)", "min(1, n)")),
    ],
)
def test_growth(name, expected):
    assert mixer(name if isinstance(name, dict) else {"part": name}).growth() == expected


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"part": "lstm", "hidden": 0}, "hidden must be at least 1, not 0"),
        ({"part": "gru", "layers": 0}, "layers must be at least 1, not 0"),
        ({"part": "gru", "begin": "memmory"}, "begin must be 'zeros' or 'memory', not 'memmory'"),
        ({"part": "gru", "begin": "memory", "both": True}, "in both directions begins with zeros"),
        ({"part": "luong", "cell": "grru"}, "unknown cell 'grru'; did you mean 'gru'"),
        ({"part": "luong", "begin": "last"}, "begin must be 'zeros' or 'memory', not 'last'"),
        ({"part": "luong", "score": "generall"}, "unknown score 'generall'; did you mean 'general'"),
        ({"part": "bahdanau", "readout": -1}, "readout must be"),
        ({"part": "convolution", "kind": "dinamic"}, "unknown kind 'dinamic'; did you mean 'dynamic'"),
        ({"part": "convolution", "into": "gelu"}, "unknown into 'gelu'; did you mean 'glu'"),
        ({"part": "convolution", "size": 0}, "size must be at least 1, not 0"),
        ({"part": "convolution", "heads": 5}, "width 12 is not divisible by 5 heads"),
        ({"part": "split", "left": "mean", "right": "mean", "share": 1.0}, "leaves one side without channels"),
        ({"part": "split", "left": "meen", "right": "mean"}, "left: unknown mixer 'meen'; did you mean 'mean'"),
    ],
)
def test_bad_arguments(spec, words):
    with pytest.raises(UserError, match=words):
        mixer(spec)


@pytest.mark.parametrize(
    "spec",
    [
        {"part": "lstm", "both": True},
        {"part": "convolution", "causal": False},
        {"part": "mean", "causal": False},
        {"part": "split", "left": {"part": "mean", "causal": False}, "right": "mean"},
    ],
)
def test_what_needs_the_whole_sequence_does_not_step(spec):
    ours = mixer(spec)
    context = Context.after(torch.tensor([3, 3]), 2)
    with pytest.raises(UserError, match="so it does not step"):
        ours.step(torch.randn(2, 2, 12), ours.start(context, 5), context)
    layer = {"mixer": spec, "wiring": "plain"}
    with pytest.raises(UserError, match=r"looks ahead|whole sequence"):
        Model(kind="decoder", width=12, heads=3, vocab=31, layer=layer)
