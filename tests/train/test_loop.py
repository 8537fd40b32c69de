"""A run from its first step to its last: where it ends, when it looks, what it keeps, and what it is for."""

import json

import pytest
import torch
from safetensors.torch import load_file

from regard import UserError
from regard.metrics import ANSWER_METRICS, HIGHER_IS_BETTER
from regard.runs import checkpoint
from regard.train import loop
from regard.train.loop import Trainer


def table(model):
    return model.embed.table.detach().clone()


def names(run):
    return [path.name for path in checkpoint.list_checkpoints(run / "checkpoints")]


def lines(run, kind):
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if kind in line]


class Judge:
    """Gives the metrics that it was told to, one after the other, and remembers what it was shown."""

    def __init__(self, *values, name="loss"):
        self.values, self.name, self.seen = list(values), name, []

    def __call__(self, model):
        assert not model.training
        torch.rand(5)  # a judge may draw; training goes on as if he had not
        self.seen.append(table(model))
        return {self.name: self.values[len(self.seen) - 1]}


def test_it_learns(trainer):
    one = trainer(steps=60, lr=0.03)
    losses = []
    one.report = lambda progress: losses.append(progress.loss)
    one.train()
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize(("bounds", "steps"), [({"steps": 7}, 7), ({"steps": 0, "epochs": 1.5}, 15)])
def test_ends(trainer, bounds, steps):
    one = trainer(**bounds)
    seen = []
    one.report = seen.append
    one.train()
    assert one.step == steps
    assert seen[-1].done == 1
    assert seen[0].done == pytest.approx(1 / steps)
    assert seen[-1].left == 0


def test_whichever_comes_first(trainer):
    one = trainer(steps=50, epochs=0.5)
    one.train()
    assert one.step == 5


def test_minutes(trainer, monkeypatch):
    """Of the clock, with evaluations, and with what came before a resumption."""
    now = [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])

    def judge(model):
        now[0] += 30
        return {"loss": 1.0}

    one = trainer(steps=0, minutes=2, eval_steps=2)
    one.evaluate = judge
    one.report = lambda progress: now.__setitem__(0, now[0] + 10)
    one.train()
    assert one.step == 6  # at 0, 10, 50, 60, 100 and 110 seconds; the last evaluation takes until after the end


def test_evaluations_take_a_fifth_of_the_minutes(trainer, monkeypatch):
    """A twentieth of a minute is 3 seconds; a judge of 5 is asked once in 25."""
    now, asked = [0.0], []
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])

    def judge(model):
        asked.append(now[0])
        now[0] += 5
        return {"loss": 1.0}

    one = trainer(steps=0, minutes=1)
    one.evaluate = judge
    learn = one.learner.advance

    def advance(*given):
        now[0] += 1
        return learn(*given)

    one.learner.advance = advance
    one.train()
    assert asked == [3, 30, 57]  # twentieths that come once it may be asked again; the last takes until the end


def test_no_end(trainer):
    with pytest.raises(UserError, match="a run needs an end"):
        trainer(steps=0)


@pytest.mark.parametrize(
    ("given", "looked"),
    [
        ({"steps": 40}, list(range(2, 41, 2))),
        ({"steps": 7}, list(range(1, 8))),
        ({"steps": 12, "eval_steps": 5}, [5, 10, 12]),
    ],
)
def test_looks(trainer, tmp_path, given, looked):
    """By default at every twentieth of the run; and always at the end."""
    one = trainer(tmp_path / "run", **given)
    one.evaluate = Judge(*range(100, 0, -1))
    one.train()
    assert [line["step"] for line in lines(tmp_path / "run", "dev")] == looked
    assert [line["step"] for line in lines(tmp_path / "run", "lr")] == list(range(1, given["steps"] + 1))


def test_keeps(trainer, tmp_path):
    """The last ones that were due, and the best."""
    one = trainer(tmp_path / "run", steps=12, save_steps=2, eval_steps=3, keep_checkpoints=2)
    one.evaluate = Judge(4, 1, 3, 2)
    one.train()
    assert names(tmp_path / "run") == ["step-00000006", "step-00000010", "step-00000012"]


def test_a_new_best_is_kept_at_once(trainer, tmp_path):
    one = trainer(tmp_path / "run", steps=12, save_steps=5, eval_steps=3, keep_checkpoints=1)
    one.evaluate = Judge(4, 1, 3, 2)
    one.train()
    assert names(tmp_path / "run") == ["step-00000006-extra", "step-00000012"]


def test_after_five_minutes(trainer, tmp_path, monkeypatch):
    """A checkpoint out of turn, which goes away when the next one comes."""
    monkeypatch.setattr(loop, "MAX_UNSAVED_SECONDS", -1.0)
    seen = []
    one = trainer(tmp_path / "run", steps=5, save_steps=4, keep_checkpoints=1)
    one.report = lambda progress: seen.append(names(tmp_path / "run"))
    one.train()
    assert seen[1] == ["step-00000000", "step-00000002-extra"]
    assert seen[-1] == ["step-00000005"]


@pytest.mark.parametrize("name", ["loss", "bleu", "token_error"])
def test_the_best_is_what_it_ends_with(trainer, tmp_path, name):
    """Higher or lower as the metric has it."""
    one = trainer(tmp_path / "run", steps=12, eval_steps=3, metric=name, save_steps=100)
    one.evaluate = judge = Judge(2, 5, 1, 3, name=name)
    found = one.train()
    best = 1 if name in HIGHER_IS_BETTER else 2
    assert found == {name: judge.values[best], "step": 3 * (best + 1)}
    assert torch.equal(table(one.model), judge.seen[best])
    written = load_file(tmp_path / "run" / "model.safetensors")
    assert any(torch.equal(tensor, judge.seen[best]) for tensor in written.values())
    (final,) = lines(tmp_path / "run", "final")
    assert final["final"] == {name: judge.values[best]}


def test_directions_are_known():
    assert {*ANSWER_METRICS, "next_sentence"} > HIGHER_IS_BETTER
    assert not hasattr(Trainer, "HIGHER_IS_BETTER")


@pytest.mark.parametrize(("name", "steps"), [("loss", 15), ("bleu", 9)])
def test_patience(trainer, tmp_path, name, steps):
    """After so many evaluations without a better one; an equal one is no better."""
    one = trainer(tmp_path / "run", steps=100, eval_steps=3, metric=name, patience=2)
    one.evaluate = Judge(3, 3, 2, 2, 5, name=name)
    one.train()
    assert one.step == steps


class Scores:
    """Give the metrics of a list of evaluations, one after the other."""

    def __init__(self, *found):
        self.found = iter(found)

    def __call__(self, model):
        return next(self.found)


@pytest.mark.parametrize(
    ("name", "found", "best"),
    [
        ("exact", [(0, 6.6), (0, 3.1), (0, 0.7), (0, 0.9)], 2),  # equal metric: the lower loss
        ("exact", [(0, 0.7), (0, 0.7), (0, 0.9)], 1),  # equal loss as well: the later step
        ("exact", [(0, 0.7), (5, 3.0), (5, 4.0)], 1),  # the metric comes first
        ("exact", [(0, float("nan")), (0, 3.0), (0, float("nan"))], 1),
        ("token_error", [(90, 0.9), (80, 2.0), (80, 1.0), (90, 0.1)], 2),
        ("loss", [(0, 3.0), (0, 3.0), (0, 4.0)], 1),
    ],
)
@pytest.mark.parametrize("killed", [False, True])
def test_a_tie_goes_to_the_lower_loss_then_to_the_later_step(trainer, tmp_path, name, found, best, killed):
    """The same checkpoint is chosen when the run is stopped and resumed between the evaluations."""
    other = "exact" if name == "loss" else name
    found = [{other: value, "loss": loss} for value, loss in found]
    given = {"eval_steps": 3, "metric": name, "keep_checkpoints": 1}
    if killed:
        for number, one in enumerate(found[:-1], 1):
            part = trainer(tmp_path / "run", steps=3 * number, **given)
            part.evaluate = Scores(one)
            part.train()
        last = trainer(tmp_path / "run", steps=3 * len(found), **given)
        last.evaluate = Scores(found[-1])
    else:
        last = trainer(tmp_path / "run", steps=3 * len(found), **given)
        last.evaluate = Scores(*found)
    assert last.train() == {**found[best], "step": 3 * (best + 1)}
    assert f"step-{3 * (best + 1):08}" in names(tmp_path / "run")


def test_a_lower_loss_alone_does_not_reset_patience(trainer, tmp_path):
    """The run ends after two evaluations without a better metric, with the lowest loss of those that tied."""
    one = trainer(tmp_path / "run", steps=100, eval_steps=3, metric="exact", patience=2)
    one.evaluate = Scores(*({"exact": 0.0, "loss": 6.0 - number} for number in range(9)))
    assert one.train() == {"exact": 0.0, "loss": 4.0, "step": 9}
    assert one.step == 9


def test_a_metric_that_is_no_number(trainer, tmp_path):
    """Is worse than any."""
    one = trainer(tmp_path / "run", steps=12, eval_steps=3)
    one.evaluate = Judge(float("nan"), 5, float("nan"), 6)
    assert one.train() == {"loss": 5, "step": 6}


def test_a_metric_that_is_not_there(trainer, tmp_path):
    one = trainer(tmp_path / "run", metric="bleu")
    one.evaluate = Judge(*range(9))
    with pytest.raises(UserError, match="'bleu' is not measured here"):
        one.train()


def test_without_dev_the_last(trainer, tmp_path):
    one = trainer(tmp_path / "run", steps=8)
    seen = []
    one.report = lambda progress: seen.append(table(one.model))
    assert one.train() == {}
    assert torch.equal(table(one.model), seen[-1])


def test_evaluation_leaves_no_trace(trainer, tmp_path):
    """Whatever it draws and however often it comes, the weights are those of a run without."""
    plain = trainer(tmp_path / "plain", ema=0.9)
    plain.train()
    watched = trainer(tmp_path / "watched", eval_steps=2, ema=0.9)
    watched.evaluate = Judge(*range(9, 0, -1))
    watched.train()
    assert torch.equal(table(plain.model), table(watched.model))


def test_mean_of_the_last(trainer, tmp_path):
    """Those that were due, not the best or the rescued ones between them."""
    one = trainer(tmp_path / "run", steps=20, save_steps=4, average=3, eval_steps=3)
    values = {}
    one.report = lambda progress: values.update({progress.step: table(one.model)})
    one.evaluate = judge = Judge(*range(9, 0, -1))
    found = one.train()
    wanted = (values[12].double() + values[16].double() + values[20].double()) / 3
    torch.testing.assert_close(table(one.model), wanted.float(), rtol=0, atol=0)
    torch.testing.assert_close(judge.seen[-1], wanted.float(), rtol=0, atol=0)
    assert found["loss"] == judge.values[len(judge.seen) - 1], "the mean itself was measured"
    with pytest.raises(UserError, match="needs a run folder"):
        trainer(average=3)


def test_moving_average(trainer, tmp_path):
    """What is evaluated, kept and written, by hand: d = min(decay, (1 + step) / (10 + step))."""
    one = trainer(tmp_path / "run", steps=6, ema=0.4, eval_steps=1)
    average, seen = table(one.model).double(), []

    def follow(progress):
        nonlocal average
        d = min(0.4, (1 + progress.step) / (10 + progress.step))
        average = d * average + (1 - d) * table(one.model).double()
        seen.append(average)

    one.report = follow
    one.evaluate = judge = Judge(6, 5, 4, 1, 3, 2)
    one.train()
    for shown, wanted in zip(judge.seen, seen, strict=True):
        torch.testing.assert_close(shown.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(table(one.model), judge.seen[3])
    kept = load_file(tmp_path / "run" / "checkpoints" / "step-00000006" / "model.safetensors")
    assert any(torch.equal(tensor, judge.seen[5]) for tensor in kept.values())


def test_moving_average_without_a_folder(trainer):
    one = trainer(steps=6, ema=0.4, eval_steps=6)
    one.evaluate = judge = Judge(1)
    one.train()
    assert torch.equal(table(one.model), judge.seen[0])


def test_goes_on_after_its_end(trainer, tmp_path):
    """As if it had been meant to be so long from the beginning: this schedule does not look at the end."""
    trainer(tmp_path / "run", steps=7, save_steps=5).train()
    longer = trainer(tmp_path / "run", steps=12, save_steps=5)
    longer.train()
    whole = trainer(tmp_path / "whole", steps=12, save_steps=5)
    whole.train()
    assert longer.step == 12
    assert torch.equal(table(longer.model), table(whole.model))
    assert [line["step"] for line in lines(tmp_path / "run", "lr")] == list(range(1, 13))


def test_a_finished_run_again(trainer, tmp_path):
    """Nothing happens, and it ends with the same."""
    trainer(tmp_path / "run").train()
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    told = (tmp_path / "run" / "metrics.jsonl").read_text()
    one = trainer(tmp_path / "run")
    one.train()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    assert [
        line.partition('"seconds"')[0] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ] == [line.partition('"seconds"')[0] for line in told.splitlines()]


def test_early_stopping_can_be_overruled(trainer, tmp_path):
    given = {"steps": 30, "eval_steps": 3, "patience": 2}
    first = trainer(tmp_path / "run", **given)
    first.evaluate = Judge(*range(10))
    first.train()
    assert first.step == 9
    again = trainer(tmp_path / "run", **given)
    again.train()
    assert again.step == 9
    more = trainer(tmp_path / "run", **given, reset_patience=True)
    more.evaluate = Judge(*range(10))
    more.train()
    assert more.step == 15
