"""Models with a memory of earlier segments, in training, after resuming, and in evaluation."""

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.core import Pattern, UserError
from regard.core.mixer import map_tensors
from regard.data import ResumableBatches
from regard.data.streams import StreamBatches, eval_streams
from regard.evaluate import evaluate
from regard.parts.objectives.next_token import NextToken
from regard.parts.objectives.segments import Segments, memory_length, required_capacity
from regard.runs.job import Job
from regard.runs.settings import Settings
from regard.train.job import resume, start
from regard.train.learner import Learner

XL = ["model.width=24", "model.heads=3", "model.depth=2", "model.layer.0.feedforward.hidden=20", "model.dropout=0.0"]
XL += ["model.layer.0.feedforward.hidden_dropout=0.0"]
SMALL = "model.layer.0.mixer.pattern=causal & block({}, before={})"
TEXT = np.random.default_rng(0).integers(3, 13, 331).astype(np.int32)


def xl(block=7, before=7, **changes):
    torch.manual_seed(0)
    return regard.build("transformer-xl", "tiny", 13, [*XL, SMALL.format(block, before)])


@pytest.fixture
def text(tmp_path):
    """Return a text that a model can predict only with a memory of earlier letters."""
    rng = random.Random(0)
    pieces = ["".join(rng.choices(rng.sample("abcdefghijklmnop", 2), k=48)) for _ in range(160)]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(pieces))
    return path


@pytest.fixture
def job(text, tmp_path):
    def make(run, *more, **train):
        settings = {
            "steps": 8,
            "context_length": 6,
            "batch_size": 5,
            "lr": 0.01,
            "warmup": 1,
            "eval_steps": 4,
            "save_steps": 4,
            **train,
        }
        changes = [*XL, SMALL.format(6, 6), *more, *(f"train.{key}={value}" for key, value in settings.items())]
        return Job(
            "transformer-xl",
            str(tmp_path / run),
            "tiny",
            changes,
            data=str(text),
            dev="0.1",
            test="0",
            threads=1,
            as_published=True,
        )

    return make


def test_streams_go_on():
    batches = StreamBatches(TEXT, 9, 4, seed=1)
    feed, ends, epochs = ResumableBatches(batches), None, set()
    for _ in range(3 * len(batches.epoch(0))):
        numbers = batches.epoch(feed.epoch)[feed.index] if feed.index < feed.size else batches.epoch(feed.epoch + 1)[0]
        batch = next(feed)
        assert batch.stream_offset == numbers[0]
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        assert batch.count == batch.targets.numel()
        if batch.stream_offset:
            assert torch.equal(batch.tokens[:, 0], ends)
        else:
            epochs.add(tuple(numbers[2:]))
        ends = batch.targets[:, -1]
    assert len(epochs) > 1, "every epoch is cut elsewhere"
    whole = np.concatenate([batches.make(n).targets.numpy().T for n in batches.epoch(5)])
    begin = batches.epoch(5)[0][2]
    assert np.array_equal(whole.T.flatten(), TEXT[begin + 1 : begin + 1 + whole.size])


@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_is_asked_for_once(rows):
    batches = list(eval_streams(TEXT, 2, 7, rows, 0))
    assert sum(batch.count for batch in batches) == len(TEXT)
    read = [torch.cat([b.tokens[row][b.targets[row] >= 0] for b in batches]) for row in range(rows)]
    said = [torch.cat([b.targets[row][b.targets[row] >= 0] for b in batches]) for row in range(rows)]
    assert np.array_equal(torch.cat(said).numpy(), TEXT)
    assert np.array_equal(torch.cat(read).numpy(), [2, *TEXT[:-1]])
    assert [batch.stream_offset for batch in batches] == list(range(0, 7 * len(batches), 7))


@pytest.mark.parametrize(("name", "more"), [
    ("transformer-xl", [SMALL.format(7, 9)]),
    ("local", ["model.layer.0.mixer.pattern=causal & window(9)"]),
    ("retnet", []),
    ("rwkv4", []),
])  # fmt: skip
@torch.no_grad()
def test_segments_are_the_whole(name, more):
    """A text in segments has the same loss as in one piece."""
    torch.manual_seed(0)
    model = regard.build(name, "tiny", 13, ["model.width=24", "model.heads=3", "model.depth=2", *more]).double().eval()
    (whole,) = eval_streams(TEXT[:150], 2, 150, 1, 0)
    objective = Segments()
    parts = [objective(model, batch) for batch in eval_streams(TEXT[:150], 2, 11, 1, 0)]
    want = NextToken()(model, whole)
    assert sum(float(part.nll) for part in parts) == pytest.approx(float(want.nll), abs=1e-7)
    without = sum(float(Segments()(model, batch).nll) for batch in eval_streams(TEXT[:150], 2, 11, 1, 0))
    assert abs(without - float(want.nll)) > 1e-3


def test_nothing_is_learned_through_the_memory():
    model, objective = xl(), Segments()
    one, two = list(eval_streams(TEXT, 2, 7, 3, 0))[:2]
    first = objective(model, one)
    map_tensors(objective.memory.kept, lambda t: pytest.fail("has a gradient") if t.requires_grad else None)
    objective(model, two).loss.backward()
    assert float(model.embed.table.grad.abs().sum()) > 0
    first.loss.backward()  # its graph was left alone


@torch.no_grad()
def test_memory_of_another_place_is_left():
    """After a setback, the data continues at a later position."""
    model, objective = xl().eval(), Segments()
    one, two, three = list(eval_streams(TEXT, 2, 7, 3, 0))[:3]
    objective(model, one)
    assert torch.equal(objective(model, three).nll, Segments()(model, three).nll)
    objective(model, one)
    assert not torch.equal(objective(model, two).nll, Segments()(model, two).nll)


def learner(steps, saved=None):
    settings = Settings(steps=9, lr=0.01, warmup=2)
    made = Learner(xl(), Segments(), ResumableBatches(StreamBatches(TEXT, 7, 3, 1)), settings)
    if saved:
        made.model.load_state_dict(saved[0])
        made.restore(*saved[1])
        made.seek(saved[1][1]["epoch"], saved[1][1]["taken"])
    for _ in range(steps):
        assert made.advance(lambda: 0.01)
    return made


def test_goes_on_from_a_checkpoint():
    whole, half = learner(7), learner(4)
    weights = {name: t.clone() for name, t in half.model.state_dict().items()}
    again = learner(3, (weights, half.state()))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    tensors, numbers = half.state()
    assert {"objective/place", "objective/0"} <= tensors.keys()
    forgets = {name: t for name, t in tensors.items() if not name.startswith("objective")}
    other = learner(3, (weights, (forgets, numbers)))
    assert not torch.equal(other.model.embed.table, whole.model.embed.table)


def test_a_bad_step_leaves_no_memory_behind():
    made = learner(2)
    kept = made.model.embed.table.detach().clone()
    with torch.no_grad():
        made.model.embed.table.fill_(torch.nan)
    assert not made.advance(lambda: 0.01)
    assert made.objective.state() == {}
    with torch.no_grad():
        made.model.embed.table.copy_(kept)
    assert made.advance(lambda: 0.01)


def test_a_run_that_was_stopped(job, tmp_path):
    start(job("whole")).train()
    start(job("halves", steps=4)).train()
    resume(tmp_path / "halves", bounds={"steps": 8}).train()
    ends = [
        load_file(tmp_path / run / "checkpoints" / "step-00000008" / "model.safetensors") for run in ("whole", "halves")
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_longer_memory_than_trained(job, tmp_path):
    start(job("run", steps=60, eval_steps=60, save_steps=60, batch_size=16)).train()
    run = regard.load(tmp_path / "run")
    rng = random.Random(1)
    lines = [("".join(rng.choices(rng.sample("abcdefghijklmnop", 2), k=48)) + "\n",) for _ in range(20)]
    loss = {n: evaluate(run, lines, ["loss"], memory=n)["scores"]["loss"] for n in (None, 0, 6, 24)}
    assert loss[None] == pytest.approx(loss[6], abs=1e-9), "as trained"
    assert loss[24] < loss[6] < loss[0] - 0.05
    assert str(run.model.stack.layers[0].branches["mixer"].pattern) == "causal & block(6, 6)", "as it was"
    with pytest.raises(UserError, match="from 0 on"):
        evaluate(run, lines, ["loss"], memory=-1)


def test_reaching():
    for pattern, want in (
        ("causal & block(6, before=6)", "causal & block(6, 24)"),
        ("causal & (window(8) | first(2))", "causal & (window(24) | first(2))"),
        ("causal", "causal"),
        ("causal & heads(window(3), block(2))", "causal & heads(window(24), block(2, 24))"),
    ):
        assert Pattern.parse(pattern).reaching(24) == Pattern.parse(want)
    model = xl()
    with memory_length(model, 40):
        assert required_capacity(model) >= 47
        assert str(model.stack.layers[1].branches["mixer"].pattern) == "causal & block(7, 40)"


@pytest.mark.parametrize(
    ("recipe", "more", "message"),
    [("gpt2", [], "positions of this model end at"), ("transformer-decoder", [], "a pattern with a limited reach")],
)
def test_memory_without_end(job, recipe, more, message, tmp_path):
    given = job("refused")
    given.recipe, given.overrides = recipe, ["objective.part=segments", "train.steps=2", *more]
    with pytest.raises(UserError, match=message):
        start(given)
