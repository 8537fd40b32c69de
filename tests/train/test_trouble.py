"""A full disk, a damaged checkpoint, a loss that is not finite, a folder in use: a sentence, and nothing lost."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from regard import UserError
from regard.data import ResumableBatches
from regard.parts.objectives.next_token import NextToken
from regard.runs import checkpoint
from regard.train import journal
from regard.train.average import average_checkpoints

FULL = OSError(errno.ENOSPC, "No space left on device")
RUST = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def names(run):
    return [path.name for path in checkpoint.list_checkpoints(run / "checkpoints")]


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def refuse(error):
    def fails(*_, **__):
        raise error

    return fails


# What fails when a disk is full: the model, the optimizer, the numbers, the last sync, and the rename.
WRITES = {
    "save_model": RUST,
    "save_file": RUST,
    "Path.write_text": FULL,
    "sha256_sums": FULL,
    "sync": FULL,
    "Path.rename": FULL,
}


@pytest.mark.parametrize("what", WRITES)
def test_a_full_disk(trainer, tmp_path, monkeypatch, what):
    run = tmp_path / "run"
    one = trainer(run, steps=12, save_steps=4)
    one.report = lambda p: monkeypatch.setattr(checkpoint_of(what), *attribute(what)) if p.step == 7 else None
    with pytest.raises(UserError) as error:
        one.train()
    monkeypatch.undo()
    assert "step-00000008: the checkpoint could not be written: the disk is full" in str(error.value)
    assert f"regard train --resume {run}" in str(error.value)
    assert names(run) == ["step-00000000", "step-00000004"]
    again = trainer(run, steps=12, save_steps=4)
    again.train()
    whole = trainer(tmp_path / "whole", steps=12, save_steps=4)
    whole.train()
    assert torch.equal(weights(again), weights(whole))
    assert not list((run / "checkpoints").glob(".*"))


def checkpoint_of(what):
    return checkpoint.Path if what.startswith("Path.") else checkpoint


def attribute(what):
    return what.rpartition(".")[2], refuse(WRITES[what])


@pytest.mark.parametrize("what", ["lines", "events", "flush"])
def test_a_full_disk_for_metrics(trainer, tmp_path, monkeypatch, what):
    run = tmp_path / "run"
    one = trainer(run, steps=12, save_steps=4)

    class Full:
        fileno = write = write_event = flush = close = refuse(FULL)

    def fill(progress):
        if progress.step == 9:
            name = "events" if what == "events" else "lines"
            getattr(one.journal, name).close()
            monkeypatch.setattr(one.journal, name, Full())
            if what == "flush":
                one.journal.lines.write = lambda text: None

    one.report = fill
    with pytest.raises(UserError, match="cannot be written to: the disk is full"):
        one.train()
    again = trainer(run, steps=12, save_steps=4)
    again.train()
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told] == list(range(1, 13))


def test_a_real_limit(trainer, tmp_path):
    """Writes that the system itself cuts short, of a real file."""
    code = """if True:
        import resource, signal, sys
        from pathlib import Path
        import torch
        from regard import UserError
        from regard.runs import checkpoint
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            checkpoint.write(Path(sys.argv[1]), 8, torch.nn.Linear(100, 100), {"a": torch.zeros(10)}, {})
        except UserError as error:
            print(error)
    """
    told = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True, check=True)
    assert "the checkpoint could not be written: " in told.stdout
    assert told.stderr == ""
    assert list((tmp_path / "x").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells which file a number stands for")
def test_on_the_disk_before_it_is_there(tmp_path, monkeypatch):
    """Every file, and the folder that names them, before the name that is looked for; and then that name."""
    done = []
    monkeypatch.setattr(checkpoint.os, "fsync", lambda file: done.append(os.readlink(f"/proc/self/fd/{file}")))
    rename = checkpoint.Path.rename
    monkeypatch.setattr(checkpoint.Path, "rename", lambda self, to: done.append("renamed") or rename(self, to))
    checkpoint.write(tmp_path, 3, torch.nn.Linear(2, 3), {"a": torch.zeros(1)}, {})
    part = str(tmp_path / ".part-step-00000003")
    names = ["model.safetensors", "trainer.safetensors", "trainer.json", "SHA256SUMS"]
    assert done == [*(f"{part}/{name}" for name in names), part, "renamed", str(tmp_path)]


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def change(path):
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["model.safetensors", "trainer.safetensors", "trainer.json", "SHA256SUMS"])
@pytest.mark.parametrize("damage", [truncate, change, os.unlink])
def test_a_damaged_checkpoint(trainer, tmp_path, file, damage):
    """It is refused in a sentence, and the one before it is taken."""
    run, said = tmp_path / "run", []
    trainer(run, steps=8, save_steps=4).train()
    damage(run / "checkpoints" / "step-00000008" / file)
    again = trainer(run, steps=12, save_steps=4, say=said.append)
    again.train()
    assert "step-00000008" in said[0]
    assert "is damaged" in said[0] or "is not a whole checkpoint" in said[0]
    assert said[1:] == ["going on from step 4"]
    assert names(run) == ["step-00000008", "step-00000012"], "written anew"
    assert (run / "checkpoints" / "damaged-step-00000008").is_dir()
    whole = trainer(tmp_path / "whole", steps=12, save_steps=4)
    whole.train()
    assert torch.equal(weights(again), weights(whole))


def test_all_are_damaged(trainer, tmp_path):
    trainer(tmp_path, steps=8, save_steps=4).train()
    for path in checkpoint.list_checkpoints(tmp_path / "checkpoints"):
        shutil.rmtree(path)
        path.mkdir()
    with pytest.raises(UserError, match=r"there is no SHA256SUMS, and no other in .* is intact"):
        trainer(tmp_path).train()


@pytest.mark.parametrize("average", [0, 3])
def test_a_damaged_one_at_the_end(trainer, tmp_path, average):
    """The final model is made of the others."""
    said = []
    one = trainer(tmp_path, steps=12, save_steps=4, average=average, say=said.append)

    def spoil(progress):
        if progress.step == 11:
            truncate(tmp_path / "checkpoints" / "step-00000004" / "model.safetensors")

    one.evaluate = lambda model: {"loss": float(one.step)}  # the first is the best
    one.settings = replace(one.settings, eval_steps=4)
    one.report = spoil
    one.train()
    assert len(said) == 1
    assert "is damaged" in said[0]
    assert "the model is made without it" in said[0]
    files = [tmp_path / "checkpoints" / f"step-{step:08d}" / "model.safetensors" for step in (8, 12)]
    wanted = average_checkpoints(files if average else files[1:])
    assert all(torch.equal(t, wanted[name]) for name, t in load_file(tmp_path / "model.safetensors").items())


def test_the_last_one_although_another_was_better(trainer, tmp_path):
    """train.average = 1"""
    for average, step in ((0, 4), (1, 12)):
        run = tmp_path / str(average)
        one = trainer(run, steps=12, save_steps=4, average=average)
        one.evaluate = lambda model, one=one: {"loss": float(one.step)}  # the first is the best
        one.settings = replace(one.settings, eval_steps=4)
        one.train()
        wanted = load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
        assert all(torch.equal(t, wanted[name]) for name, t in load_file(run / "model.safetensors").items())


@pytest.mark.parametrize("damage", [truncate, change])
def test_a_damaged_final_model(trainer, tmp_path, damage):
    """It is refused, and going on with the run makes it anew."""
    trainer(tmp_path, steps=8, save_steps=4).train()
    final = checkpoint.final_weights(tmp_path)
    whole = final.read_bytes()
    damage(final)
    with pytest.raises(
        UserError, match=r"model\.safetensors is damaged.* anew of its checkpoints: regard train --resume"
    ):
        checkpoint.final_weights(tmp_path)
    trainer(tmp_path, steps=8, save_steps=4).train()
    assert checkpoint.final_weights(tmp_path).read_bytes() == whole
    final.unlink()
    assert checkpoint.final_weights(tmp_path) is None


def test_of_another_model(trainer, model, tmp_path):
    trainer(tmp_path).train()
    with pytest.raises(UserError, match="does not fit this run"):
        trainer(tmp_path, model=model(width=8)).train()
    with pytest.raises(UserError, match="'adam' as optimizer, not 'sgd'"):
        trainer(tmp_path, optimizer="sgd").train()


class Without:
    """The batches of a feed but for some, by epoch and number."""

    def __init__(self, batches, *out):
        self.batches, self.out = batches, out

    def epoch(self, number):
        return [b for i, b in enumerate(self.batches.epoch(number)) if (number, i) not in self.out]

    def make(self, numbers):
        return self.batches.make(numbers)


def bad_after(calls, often=1):
    """An objective whose loss is not finite, so many times, after so many calls."""
    state = {"calls": 0, "bad": 0}

    def objective(model, batch):
        state["calls"] += 1
        found = NextToken()(model, batch)
        if state["calls"] > calls and state["bad"] < often:
            state["bad"] += 1
            return found._replace(loss=found.loss * float("inf"))
        return found

    return objective


def bad_every(often, after=0):
    """One whose loss is not finite at every so manyth call, after so many."""
    calls = []

    def objective(model, batch):
        calls.append(1)
        found = NextToken()(model, batch)
        bad = len(calls) > after and len(calls) % often == 0
        return found._replace(loss=found.loss * float("nan")) if bad else found

    return objective


def test_a_loss_that_is_not_finite(trainer, feed, tmp_path):
    """The run goes back, says so, and ends as if the batches since the checkpoint had never been there."""
    run, said = tmp_path / "run", []
    one = trainer(run, steps=12, save_steps=4, objective=bad_after(6), say=said.append, ema=0.9)
    one.train()
    assert said == ["the loss was not finite at step 7: back to step 4, without the batches that led there"]
    without = ResumableBatches(Without(feed().batches, (0, 4), (0, 5), (0, 6)))
    other = trainer(tmp_path / "other", steps=12, save_steps=4, feed=without, ema=0.9)
    other.train()
    assert torch.equal(weights(one), weights(other))
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told] == list(range(1, 13))


def test_back_to_what_was_due(trainer, tmp_path, monkeypatch):
    """Not to a checkpoint that happens to be there because somebody stopped the run."""
    runs = []
    for name, rescue in (("one", -1.0), ("other", 300.0)):
        monkeypatch.setattr("regard.train.loop.MAX_UNSAVED_SECONDS", rescue)
        runs.append(trainer(tmp_path / name, steps=12, save_steps=4, objective=bad_after(6)))
        runs[-1].train()
    assert torch.equal(weights(runs[0]), weights(runs[1]))


@pytest.mark.parametrize("rescue", [-1.0, 300.0])
def test_it_is_given_up(trainer, tmp_path, monkeypatch, rescue):
    """When it goes wrong again and again, though there were good steps and checkpoints out of turn between; what was
    good is still there, and nothing else."""
    monkeypatch.setattr("regard.train.loop.MAX_UNSAVED_SECONDS", rescue)
    said = []

    def say(sentence):
        said.append(names(tmp_path))

    with pytest.raises(UserError, match=r"not finite at step \d, as in 5 attempts before: lower train.lr"):
        trainer(tmp_path, steps=50, save_steps=5, objective=bad_every(3, after=5), say=say).train()
    assert said == [["step-00000000", "step-00000005"]] * 5
    again = trainer(tmp_path, steps=12, save_steps=5)
    again.train()
    assert again.step == 12


def test_some_setbacks_here_and_there(trainer, tmp_path):
    """Are no reason to give up, when checkpoints lie between them."""
    said = []
    one = trainer(tmp_path, steps=24, save_steps=2, objective=bad_every(4), say=said.append)
    one.train()
    assert one.step == 24
    assert len(said) > 5


def test_weights_that_are_not_finite(trainer, tmp_path):
    """They are found before they are evaluated or kept."""
    said = []
    one = trainer(tmp_path, steps=12, save_steps=4, say=said.append)

    def spoil(step):
        if step == 8 and not said:
            with torch.no_grad():
                one.model.embed.table[3] = float("inf")

    one.learner.ema.update = spoil
    one.train()
    assert said == ["the weights were not finite after step 8: back to step 4, without the batches that led there"]
    assert one.learner.all_finite()


def test_without_a_folder(trainer):
    """The batch is left out."""
    said = []
    one = trainer(steps=12, objective=bad_after(6, often=3), say=said.append)
    one.train()
    assert said == ["the loss was not finite at step 7: that batch is skipped"] * 3
    assert one.step == 12
    with pytest.raises(UserError, match="not finite at step 4, as in 5 attempts"):
        trainer(steps=12, objective=bad_after(3, often=6)).train()
    now_and_then = trainer(steps=24, objective=bad_every(3))
    now_and_then.train()
    assert now_and_then.step == 24
    spoiled = trainer(steps=12)
    with torch.no_grad():
        spoiled.model.embed.table[:] = float("nan")
    with pytest.raises(UserError, match="at step 1, and there is no run folder to go back to"):
        spoiled.train()


def test_in_use(trainer, tmp_path):
    one, refused = trainer(tmp_path), []

    def other(progress):
        with pytest.raises(UserError) as error:
            trainer(tmp_path).train()
        refused.append(str(error.value))

    one.report = other
    one.train()
    assert refused == [f"{tmp_path} is in use by another process (process {os.getpid()}): wait for it, or stop it"] * 12
    trainer(tmp_path, steps=15).train()


def test_a_lock_without_anything_else_goes_away(tmp_path):
    with pytest.raises(UserError), checkpoint.locked(tmp_path / "new"):
        raise UserError("no")
    assert not (tmp_path / "new").exists()
    with checkpoint.locked(tmp_path / "new"):
        pass
    assert (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"), checkpoint.locked(tmp_path / "file"):
        pass


def test_what_a_kill_left_is_cleared_away(tmp_path):
    for name in (
        "step-00000003",
        "step-00000004",
        ".part-step-00000009",
        ".gone-step-00000001",
        "damaged-step-00000002",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    checkpoint.prune(tmp_path, 1, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-00000002", "step-00000004"]


def test_mean_of_files(tmp_path):
    for i, value in enumerate((1.0, 2.0, 6.0)):
        tensors = {"a": torch.full((2, 3), value), "n": torch.tensor(i)}
        checkpoint.write_atomically(tmp_path / f"{i}.safetensors", tensors)
    found = average_checkpoints([tmp_path / f"{i}.safetensors" for i in range(3)])
    assert torch.equal(found["a"], torch.full((2, 3), 3.0))
    assert int(found["n"]) == 2


def test_half_a_line_is_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    told = '{"step": 1, "loss": 3.0}\n{"step": 2, "dev": {"loss": 2.0}}\n'
    path.write_text(told + '{"step": 2, "final": {}}\n{"step": 3}\n')
    journal.truncate_after(path, 2)
    assert path.read_text() == told
    for half in ('{"step": 2, "lo', '{"step": 2}'):
        path.write_text(told + half)
        journal.truncate_after(path, 9)
        assert path.read_text() == told
    journal.truncate_after(tmp_path / "nothing", 3)
