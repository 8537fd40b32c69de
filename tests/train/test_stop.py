"""Ctrl-C, a polite kill, a closed terminal: finish the step, save, say how to go on. A second one: at once."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from regard.runs import checkpoint
from regard.train.stop import SIGNALS, Stop, Stopped

SETTINGS = {"steps": 12, "save_steps": 4, "eval_steps": 3, "average": 2, "ema": 0.9}


def judge(model):
    return {"loss": float(model.embed.table.detach().norm())}


def names(run):
    return [path.name for path in checkpoint.list_checkpoints(run / "checkpoints")]


@pytest.fixture(autouse=True)
def heard():
    """Signals are heard as in a terminal, even where the tests run behind nohup, which has some ignored."""
    before = {which: signal.getsignal(which) for which in SIGNALS}
    for which in SIGNALS:
        signal.signal(which, signal.default_int_handler if which == signal.SIGINT else signal.SIG_DFL)
    yield
    for which, handler in before.items():
        signal.signal(which, handler)


@pytest.fixture
def whole(trainer, tmp_path):
    """The weights of a run that nobody stopped."""
    one = trainer(tmp_path / "whole", **SETTINGS)
    one.evaluate = judge
    one.train()
    return (tmp_path / "whole" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("which", SIGNALS)
@pytest.mark.parametrize("when", [1, 5, 8])
def test_stops_and_goes_on(trainer, tmp_path, whole, which, when):
    """After the very step in which it was asked, and in the end as if it had not been stopped."""
    run, said = tmp_path / "run", []
    one = trainer(run, **SETTINGS, say=said.append)
    one.evaluate = judge
    one.report = lambda progress: os.kill(os.getpid(), which) if progress.step == when else None
    before = [signal.getsignal(s) for s in SIGNALS]
    with pytest.raises(KeyboardInterrupt):
        one.train()
    assert [signal.getsignal(s) for s in SIGNALS] == before
    assert one.step == when
    assert names(run)[-1] == f"step-{when:08d}" + ("" if when % 4 == 0 else "-extra")
    assert f"stopped after step {when}; go on with: regard train --resume {run}" in said
    assert not (run / "model.safetensors").exists()
    again = trainer(run, **SETTINGS, say=said.append)
    again.evaluate = judge
    torch.manual_seed(99)
    again.train()
    assert f"going on from step {when}" in said
    assert (run / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("when", [3, 12])
def test_an_evaluation_is_broken_off(trainer, tmp_path, whole, when):
    """So that nobody waits for it, and done when the run goes on."""
    run, told = tmp_path / "run", []
    one = trainer(run, **SETTINGS)

    def long(model):
        if one.step == when and not told:
            told.append("begun")
            os.kill(os.getpid(), signal.SIGINT)
            told.append("went on")
        return judge(model)

    one.evaluate = long
    with pytest.raises(KeyboardInterrupt):
        one.train()
    assert told == ["begun"]
    assert one.step == when
    again = trainer(run, **SETTINGS)
    seen = []
    again.evaluate = lambda model: seen.append(again.step) or judge(model)
    again.train()
    assert seen == [*range(when, 13, 3), 12], "and the mean at the end"
    assert (run / "model.safetensors").read_bytes() == whole


def test_broken_off_when_patience_ends(trainer, tmp_path):
    """It is over after the evaluation that was made up for, and not a step later."""
    given = {"steps": 12, "eval_steps": 3, "patience": 1}
    one = trainer(tmp_path, **given)
    one.evaluate = lambda model: {"loss": os.kill(os.getpid(), signal.SIGINT) if one.step == 6 else 1.0}
    with pytest.raises(KeyboardInterrupt):
        one.train()
    again = trainer(tmp_path, **given)
    again.evaluate = lambda model: {"loss": 1.0}
    again.train()
    assert again.step == 6


def test_twice_stops_at_once(trainer, tmp_path):
    run = tmp_path / "run"
    one = trainer(run, **SETTINGS)
    plain = one.learner.objective

    def slow(model, batch):
        if one.step == 6:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("not at once")
        return plain(model, batch)

    one.learner.objective = slow
    with pytest.raises(KeyboardInterrupt):
        one.train()
    assert names(run)[-1] == "step-00000004"


def test_what_was_ignored_stays_ignored():
    """As under nohup."""
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = Stop()
        with stop.catch_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, old)


def test_outside_the_main_thread(trainer):
    """It works; only it cannot be stopped in this way."""
    one = trainer(steps=3)
    thread = threading.Thread(target=one.train)
    thread.start()
    thread.join()
    assert one.step == 3


def test_asked_before_something_long():
    stop = Stop()
    with stop.catch_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped), stop.interruptible():
            raise AssertionError


def test_from_the_command_line(pairs, tmp_path):
    """Exit code 130, and the sentence that says how to go on."""
    program = "import sys; from regard.cli import main; sys.exit(main())"
    command = [
        "train",
        "transformer",
        "--size",
        "tiny",
        "--data",
        pairs,
        "--steps",
        "100000",
        "--out",
        tmp_path / "run",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate()
    assert process.returncode == 130, told
    assert f"go on with: regard train --resume {tmp_path / 'run'}" in told.replace("\n", "")
    assert names(tmp_path / "run")[-1].endswith("-extra")
