"""Permutation language models: the targets, and runs that learn, resume and generate."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.core import UserError
from regard.data import ResumableBatches
from regard.data.orders import PermutedBatches, target_positions
from regard.data.streams import StreamBatches
from regard.decode import DecodeConfig
from regard.evaluate import evaluate
from regard.parts.objectives.permuted import Permuted
from regard.runs.job import Job
from regard.runs.settings import Settings
from regard.train.job import resume, start
from regard.train.learner import Learner

TINY = ["model.width=24", "model.heads=3", "model.depth=1", "model.layer.0.feedforward.hidden=32", "model.dropout=0.0"]
TINY += [f"model.layer.0.{name}=0.0" for name in ("mixer.weight_dropout", "feedforward.hidden_dropout")]
TEXT = np.random.default_rng(0).integers(3, 13, 331).astype(np.int32)
LINE = "abcdefgh"


@pytest.fixture
def job(tmp_path):
    """Make a job on a repeated alphabet, in which every neighbor determines a letter."""
    (tmp_path / "text.txt").write_text("\n".join([LINE * 6] * 60))

    def make(run, **train):
        settings = {
            "steps": 6,
            "context_length": 12,
            "batch_size": 6,
            "lr": 0.01,
            "warmup": 1,
            "eval_steps": 3,
            "save_steps": 3,
            **train,
        }
        changes = [*TINY, "model.layer.0.mixer.memory=12", *(f"train.{key}={value}" for key, value in settings.items())]
        given = {"data": str(tmp_path / "text.txt"), "dev": "0.1", "test": "0", "threads": 1}
        return Job("xlnet", str(tmp_path / run), "tiny", changes, **given, as_published=True)

    return make


def test_orders():
    orders = PermutedBatches(StreamBatches(TEXT, 13, 4, 1), every=6, seed=1)
    batch = orders.make(orders.epoch(0)[1])
    assert (batch.tokens.shape, batch.targets.shape, batch.stream_offset) == ((4, 13), (4, 2), 13)
    ranks = batch.pattern.ranks
    assert all(sorted(row.tolist()) == [0] * 11 + [1, 2] for row in ranks)
    at = target_positions(ranks)
    assert torch.equal(ranks.gather(1, at), torch.tensor([[1, 2]] * 4))
    assert torch.equal(batch.targets, batch.tokens.gather(1, at))
    assert not torch.equal(ranks[0], ranks[1]), "each row has its own"
    again = orders.make(orders.epoch(0)[1])
    assert torch.equal(again.pattern.ranks, ranks)
    other = orders.make(orders.epoch(1)[1])
    assert not torch.equal(other.pattern.ranks, ranks), "a new epoch, new orders"
    read = [orders.make(numbers).tokens for numbers in orders.epoch(2)]
    begin = orders.epoch(2)[0][3]
    whole = torch.cat(read, 1)
    assert np.array_equal(whole[0].numpy(), TEXT[begin : begin + whole.shape[1]]), "segment after segment"


def learner(steps, saved=None):
    torch.manual_seed(0)
    model = regard.build("xlnet", "tiny", 13, [*TINY, "model.layer.0.mixer.memory=7"])
    feed = ResumableBatches(PermutedBatches(StreamBatches(TEXT, 9, 3, 1), 4, 1))
    made = Learner(model, Permuted(), feed, Settings(steps=9, lr=0.01, warmup=2))
    if saved:
        model.load_state_dict(saved[0])
        made.restore(*saved[1])
        made.seek(saved[1][1]["epoch"], saved[1][1]["taken"])
    for _ in range(steps):
        assert made.advance(lambda: 0.01)
    return made


def test_goes_on_from_a_checkpoint():
    whole, half = learner(6), learner(3)
    weights = {name: t.clone() for name, t in half.model.state_dict().items()}
    again = learner(3, (weights, half.state()))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    tensors, numbers = half.state()
    forgets = {name: t for name, t in tensors.items() if not name.startswith("objective")}
    other = learner(3, (weights, (forgets, numbers)))
    assert not torch.equal(other.model.embed.table, whole.model.embed.table), "the memory is part of it"


def test_a_run_that_was_stopped(job, tmp_path):
    start(job("whole")).train()
    start(job("halves", steps=3)).train()
    resume(tmp_path / "halves", bounds={"steps": 6}).train()
    paths = [tmp_path / run / "checkpoints" / "step-00000006" / "model.safetensors" for run in ("whole", "halves")]
    ends = [load_file(path) for path in paths]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_learns_and_goes_on(job, tmp_path):
    start(job("run", steps=120, eval_steps=120, save_steps=120, batch_size=16, warmup=5)).train()
    run = regard.load(tmp_path / "run")
    told = evaluate(run, [(LINE * 6,)] * 8, ["loss", "perplexity"])
    assert told["scores"]["loss"] < 0.7, "by chance 2.2"
    assert told["counts"]["tokens"] > 20
    (best,) = run.predict(["abcdefghab"], DecodeConfig())[0][:1]
    assert best.text.startswith("cdefgh")
    assert "".join(run.stream("abcdefghab", DecodeConfig())) == best.text
    both = run.predict(["abcdefghab", "abcd"], DecodeConfig())
    assert both[0][0].text == best.text, "a row of a padded batch answers as it does alone"
    with pytest.raises(UserError, match="accuracy"):
        evaluate(run, [("abc",)], ["accuracy"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("objective.every=1", "every must be at least 2"),
        ("objective.evry=5", "did you mean 'objective.every'"),
        ("model.embed=tokens", "start from the recipe xlnet"),
    ],
)
def test_refused(job, change, message):
    given = job("refused")
    given.overrides.append(change)
    with pytest.raises(UserError, match=message):
        start(given)
