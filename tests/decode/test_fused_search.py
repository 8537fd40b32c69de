"""Search and encoding in one call of a kernel: the same answers as step by step, and only while nothing was touched."""

import copy
import sys

import pytest
import torch

from regard.core import Position, UserError, part
from regard.decode import Hypothesis, Request, beam, greedy
from regard.decode.fused_search import FUSED_SEARCH
from regard.decode.int8 import quantize
from regard.decode.session import FUSED_ENCODER, MAX_SOURCE, Session
from regard.native import build
from regard.ops import dispatch
from regard.ops.dispatch import KERNEL, disabled, recording
from regard.verify.edits import EDITS
from tests.models import shallow

pytestmark = pytest.mark.skipif(build.load_kernels() is None, reason="there is no compiler")

VOCAB, START, MOST = 37, 2, 11
SEARCHED = ["transformer", "transformer-preln", "marian", "gpt2"]
ENCODED = ["transformer", "transformer-preln", "marian", "bart", "t5"]
EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}


def make(name, dtype=torch.float64, *overrides):
    """A model whose most probable tokens are far ahead of the next ones."""
    torch.manual_seed(4)
    model = shallow(name, VOCAB, overrides).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def request(model, end, most=MOST, prefix=(START,), session=None, **more):
    torch.manual_seed(5)
    source, limit, begins = torch.randint(4, VOCAB, (1, 7)), torch.tensor([most]), torch.tensor([prefix])
    if model.kind == "decoder":
        return Request(torch.cat((begins, source), 1), end, limit, **more)
    with torch.no_grad():
        return Request(begins, end, limit, memory=(session or model).encode(source), **more)


def searched(model, given, size=1, session=None, **settings):
    """The answers, and whether the kernel has searched."""
    session = session or Session(model)
    with recording() as decisions:
        found = beam(session, given, size, **settings)[0] if size > 1 else greedy(session, given)
    return found, any(one.op == FUSED_SEARCH and one.runs_on == KERNEL for one in decisions)


def stepped(model, given, size=1, **settings):
    with disabled():
        found, fused = searched(model, given, size, **settings)
    assert not fused
    return found


def same(found: list[Hypothesis], wanted: list[Hypothesis], close: float = 1e-6) -> None:
    """Greedy search step by step adds up log-probabilities in float32."""
    assert [(one.tokens, one.ended) for one in found] == [(one.tokens, one.ended) for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.score == pytest.approx(other.score, rel=close, abs=close)
        assert one.logprob == pytest.approx(other.logprob, rel=close, abs=close)


def ends(model) -> list[int]:
    """End tokens with which greedy search ends at once, after four tokens, and never."""
    said = stepped(model, request(model, end=-1))[0].tokens
    return [said[0], said[4], next(token for token in range(VOCAB) if token not in said)]


@pytest.mark.pairwise
@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("dtype", list(EXACT))
@pytest.mark.parametrize("tie", ["none", "target"])
@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_answers_are_those_of_single_steps(name, dtype, tie, when, size, threads):
    model = make(name, dtype, f"model.tie={tie}")
    given = request(model, ends(model)[when])
    settings = {"num_return": size, "length_penalty": 0.7} if size > 1 else {}
    found, fused = searched(model, given, size, **settings)
    assert fused
    same(found, stepped(model, given, size, **settings), EXACT[dtype] if size > 1 else 1e-5)
    if size == 1:
        assert len(found[0].tokens) <= (0, 4, MOST)[when]
        assert found[0].ended == (when < 2)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("most", [1, 2, 30])
def test_the_maximum_length(size, most):
    for name in ("transformer", "gpt2"):
        model = make(name)
        for end in ends(model):
            given = request(model, end, most)
            found, fused = searched(model, given, size)
            assert fused
            same(found, stepped(model, given, size))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("biased", [True, False])
def test_biases(size, biased):
    """Of the head, and none in attention."""
    head = ("model.head.part=vocabulary", "model.head.bias=true")
    model = make("transformer", torch.float64, *(head if biased else ("model.decoder.layer.0.mixer.bias=false",)))
    given = request(model, ends(model)[1])
    found, fused = searched(model, given, size)
    assert fused
    same(found, stepped(model, given, size))


@pytest.mark.parametrize("size", [1, 4])
def test_a_padded_source(size):
    """Its padding is not attended to."""
    model = make("transformer")
    given, valid = request(model, ends(model)[1]), torch.tensor([[True] * 5 + [False] * 2])
    padded = given._replace(memory=given.memory._replace(valid=valid))
    found, fused = searched(model, padded, size)
    assert fused
    same(found, stepped(model, padded, size))
    assert found[0].logprob != pytest.approx(searched(model, given, size)[0][0].logprob)


@pytest.mark.parametrize("size", [1, 3])
def test_a_forced_prefix_counts_in_the_length(size):
    model = make("transformer")
    given = request(model, ends(model)[1], prefix=(START, 9, 8), counted_prefix=2)
    found, fused = searched(model, given, size)
    assert fused
    same(found, stepped(model, given, size))


@pytest.mark.parametrize("size", [1, 4])
def test_kernels_of_other_cpus(size, known, monkeypatch):
    monkeypatch.setattr(dispatch, "load_kernels", lambda: known)
    for dtype, close in EXACT.items():
        model = make("transformer", dtype)
        given = request(model, ends(model)[1])
        found, fused = searched(model, given, size)
        assert fused
        same(found, stepped(model, given, size), max(close, 1e-6))


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_counts_in_the_next_search(edit):
    """Also in a session that has searched before; both without and with an end token that was found before."""
    model = make("transformer")
    session, end = Session(model), ends(model)[2]
    before = searched(model, request(model, end, session=session), 3, session=session)
    assert before[1]
    torch.manual_seed(7)
    edit(model)
    given = request(model, end, session=session)
    found = searched(model, given, 3, session=session)[0]
    with disabled():
        given = request(model, end)
    same(found, stepped(model, given, 3), 1e-9)
    assert [one.logprob for one in found] != pytest.approx([one.logprob for one in before[0]], rel=1e-9)


def watch(model):
    model.stack.layers[0].out.watchers.append(lambda x: None)


def rows(model):
    model.logits = lambda x: type(model).logits(model, x) * 2


TOUCHED = {
    "a hook of the embed": lambda model: model.embed.register_forward_hook(lambda module, args, y: 2 * y),
    "a hook inside the embed": lambda model: model.embed.drop.register_forward_hook(lambda module, args, y: 2 * y),
    "a hook of the head": lambda model: model.head.register_forward_hook(lambda module, args, y: 2 * y),
    "a hook of the model": lambda model: model.register_forward_hook(lambda module, args, y: 2 * y),
    "a forward of the embed": lambda model: setattr(
        model.embed, "forward", lambda x, context: 0 * model.embed.table[x]
    ),
    "logits of its own": rows,
    "a watched tap": watch,
    "training": lambda model: model.stack.layers[1].train(),
    "a head that squashes": lambda model: setattr(model.head, "softcap", 2.0),
    "a head that scales": lambda model: setattr(model.head, "scale", 0.5),
    "int8": lambda model: quantize(model).eval(),
}


@pytest.mark.parametrize("what", list(TOUCHED))
def test_what_is_touched_is_stepped(what):
    model = make("transformer", torch.float32, "model.dropout=0")
    before = searched(model, request(model, end=1), 3)
    TOUCHED[what](model)
    given = request(model, end=1)
    found, fused = searched(model, given, 3)
    assert before[1]
    assert not fused
    if what != "int8":  # which has other products without kernels
        same(found, stepped(model, given, 3), 1e-5)


@pytest.mark.parametrize("name", ["llama", "bloom", "bart", "t5", "local"])
def test_other_models_are_stepped(name):
    """Rotated, biased, with a norm after the embed, with a scaled head, or windowed."""
    model = make(name)
    given = request(model, end=1)
    found, fused = searched(model, given)
    assert not fused
    same(found, stepped(model, given))


def test_a_cache_that_drops_keys_is_stepped():
    """Its slots are used again, and not all of them are attended to."""
    model = make("gpt2", torch.float64, "model.layer.0.mixer.pattern=causal & window(3)")
    given = Request(torch.tensor([[START]]), 1, torch.tensor([MOST]))
    found, fused = searched(model, given, 3)
    assert not fused
    same(found, stepped(model, given, 3))


def test_more_than_one_row_and_processed_logits_are_stepped():
    model = make("gpt2")
    given = request(model, end=1)
    two = given._replace(prefix=given.prefix.repeat(2, 1), max_new_tokens=given.max_new_tokens.repeat(2))
    processed = given._replace(logits_processor=lambda scores, generated: scores.flip(1))
    padded = given._replace(valid=torch.arange(given.prefix.shape[1])[None] < 4)
    masked = given._replace(valid=torch.ones_like(given.prefix, dtype=torch.bool))
    for one in (two, processed, padded, masked):
        assert not searched(model, one)[1]
    assert not searched(model, given, 3, early_stopping="never")[1]
    with recording() as decisions:
        greedy(Session(model), given, on_token=lambda row, token: None)
    assert FUSED_SEARCH not in {one.op for one in decisions}


def test_what_is_wrong_is_told_as_it_is_step_by_step():
    model = make("gpt2")
    with pytest.raises(UserError, match="range from 99"):
        greedy(Session(model), request(model, end=1)._replace(prefix=torch.tensor([[99]])))
    with pytest.raises(UserError, match="beyond"):
        greedy(Session(model), request(model, end=1, most=10_000))
    with torch.no_grad():
        model.head.table.fill_(torch.nan)
    for size in (1, 3):
        with pytest.raises(UserError, match="NaN"):
            searched(model, request(model, end=1), size)


def encoded(model, source, session=None):
    with torch.no_grad(), recording() as decisions:
        x = (session or Session(model)).encode(source).x
    return x, any(one.op == FUSED_ENCODER and one.runs_on == KERNEL for one in decisions)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("dtype", list(EXACT))
@pytest.mark.parametrize("length", [1, 13, 30, MAX_SOURCE])
def test_an_encoder_in_one_call(name, dtype, length, threads):
    model = make(name, dtype)
    source = torch.randint(VOCAB, (1, length))
    x, fused = encoded(model, source)
    assert fused
    with torch.no_grad(), disabled():
        wanted = model.encode(source).x
    torch.testing.assert_close(x, wanted, rtol=0, atol=5 * EXACT[dtype] * float(wanted.abs().max()))


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_counts_in_the_next_source(edit):
    model = make("transformer-preln")
    session, source = Session(model), torch.randint(VOCAB, (1, 6))
    before, fused = encoded(model, source, session)
    assert fused
    torch.manual_seed(7)
    edit(model)
    x = encoded(model, source, session)[0]
    with torch.no_grad(), disabled():
        torch.testing.assert_close(x, model.encode(source).x)
    assert edit.__name__ == "hook_ends" or not torch.allclose(x, before)


@pytest.mark.parametrize("length", [6, 30])
def test_an_encoder_in_eight_bits(length):
    model, source = quantize(make("transformer", torch.float32)).eval(), torch.randint(VOCAB, (1, length))
    x, fused = encoded(model, source)
    assert fused
    with torch.no_grad(), disabled():
        torch.testing.assert_close(x, model.encode(source).x, rtol=0, atol=1e-3)


@pytest.mark.parametrize("length", [6, 30])
def test_weights_changed_without_a_sign_count_in_the_next_source(length):
    model, source = make("transformer-preln"), torch.randint(VOCAB, (1, length))
    session = Session(model)
    encoded(model, source, session)
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    with torch.no_grad(), disabled():
        wanted = model.encode(source).x
    torch.testing.assert_close(encoded(model, source, session)[0], wanted)


class Stretched(Position):
    """Its vectors do depend on the token."""

    def embed(self, x, at):
        return x * (1 + at[..., None])


def test_a_position_that_multiplies_is_stepped():
    model = make("transformer")
    model.embed.position = Stretched().eval()
    given = request(model, end=1)
    found, fused = searched(model, given, 3)
    assert not fused
    same(found, stepped(model, given, 3))


@pytest.mark.parametrize(
    "spec", [{"part": "sinusoidal"}, {"part": "learned", "length": 29}, {"part": "axial", "shape": [5, 6]}]
)
def test_positions_that_add_vectors_add_the_same_to_all(spec):
    position, at = part(Position, spec, width=16, dim=16, heads=1), torch.arange(9)[None]
    x = torch.randn(1, 9, 16)
    assert position.adds_vectors
    torch.testing.assert_close(position.embed(x, at) - x, position.embed(torch.zeros_like(x), at))


def test_sources_that_are_encoded_otherwise():
    model = make("transformer")
    two, long = torch.randint(VOCAB, (2, 6)), torch.randint(VOCAB, (1, MAX_SOURCE + 1))
    assert not encoded(model, two)[1]
    assert not encoded(model, long)[1]
    assert not encoded(copy.deepcopy(model).train(), two[:1])[1]
    with recording() as decisions:
        Session(model).encode(two[:1])
    assert {one.why for one in decisions if one.op == FUSED_ENCODER} == {
        "gradients are enabled: there is no torch.no_grad() around it"
    }
    with torch.no_grad(), recording() as decisions:
        Session(model).encode(two[:1], torch.tensor([[True] * 4 + [False] * 2]))
    assert all(one.runs_on != KERNEL for one in decisions if one.op == FUSED_ENCODER)


def test_layers_of_one_state_share_their_positions():
    """So that one layer's plan is that of all."""
    model = make("transformer")
    with torch.no_grad():
        state = model.start(1, 5, memory=model.encode(torch.randint(VOCAB, (1, 6))))
    assert len({id(layer[0].at) for layer in state.layers}) == 1


def test_it_is_reached_from_the_functions_that_users_call():
    """`greedy` and `beam` of a plain model make a session of their own."""
    assert sys.modules["regard.decode.sample"].fused_search is sys.modules["regard.decode.beam"].fused_search
    model = make("transformer")
    given = request(model, end=1)
    with recording() as decisions:
        greedy(model, given)
        beam(model, given, 2)
    assert sum(times for one, times in decisions.items() if one.op == FUSED_SEARCH and one.runs_on == KERNEL) == 2


def test_the_widest_beam():
    """The kernel keeps twice as many continuations as hypotheses, in arrays of a fixed size."""
    assert build.load_kernels().keep >= 2 * dispatch.FEW_ROWS
    torch.manual_seed(4)
    model, size = shallow("transformer-preln", 101).double().eval(), dispatch.FEW_ROWS
    with torch.no_grad():
        memory = model.encode(torch.randint(4, 101, (1, 7)))
        with recording() as seen:
            (found,) = beam(model, Request.after(START, 3, memory, MOST), size, num_return=size)
        assert KERNEL in {decision.runs_on for decision in seen if decision.op == FUSED_SEARCH}
        with disabled():
            (wanted,) = beam(model, Request.after(START, 3, memory, MOST), size, num_return=size)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in wanted], abs=1e-9)
