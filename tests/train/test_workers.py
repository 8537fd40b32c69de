"""Several processes that learn from one batch: the same as one, from the same state the same, and none is left over."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from regard.core import UserError
from regard.parts.objectives.next_token import NextToken
from regard.runs.settings import Settings
from regard.train import workers
from regard.train.learner import Learner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")


@pytest.fixture(autouse=True)
def spread(monkeypatch):
    """Whatever the size of a batch."""
    monkeypatch.setattr("regard.train.learner.MIN_WORK_FOR_WORKERS", 1)


@pytest.fixture
def cores():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def learner(feed):
    def make(model, **given) -> Learner:
        settings = Settings(max_grad_norm=0.0, lr=1e-2, schedule="constant", warmup=0, **given)
        return Learner(model, NextToken(0.1), feed(), settings)

    return make


@pytest.mark.parametrize("many", [2, 3, 7])
def test_the_steps_are_those_of_one(model, learner, cores, many):
    """More processes than rows among them."""
    found = []
    for count in (1, many):
        cores(count)
        torch.manual_seed(1)
        one = learner(model(dropout=0.0).double(), gradient_accumulation=2)
        losses = []
        for _ in range(3):
            assert one.advance(lambda: 1e-2)
            losses.append(one.loss)
        assert torch.get_num_threads() == count
        assert (one._workers is not None) == (count > 1)
        found.append((losses, [(p.detach().clone(), p.grad) for p in one.model.parameters()]))
    (losses, learned), (same_losses, same_learned) = found
    assert losses == pytest.approx(same_losses, rel=1e-9)
    for (weight, grad), (same_weight, same_grad) in zip(learned, same_learned, strict=True):
        torch.testing.assert_close(grad, same_grad, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(weight, same_weight, rtol=1e-7, atol=1e-9)


def test_the_same_steps_follow(model, learner, cores):
    """From a state in the middle, dropout and all."""
    cores(2)
    torch.manual_seed(1)
    one = learner(model(dropout=0.3), ema=0.9)
    for _ in range(2):
        one.advance(lambda: 1e-2)
    with one.ema.swapped_in():
        tensors, numbers = one.state()
        kept = {name: value.clone() for name, value in tensors.items()}, numbers
        weights = {name: value.clone() for name, value in one.model.state_dict().items()}
    losses = [one.loss for _ in range(3) if one.advance(lambda: 1e-2)]
    torch.manual_seed(2)
    other = learner(model(dropout=0.3), ema=0.9)
    other.model.load_state_dict(weights)
    other.restore(*kept)
    other.seek(numbers["epoch"], numbers["taken"])
    assert [other.loss for _ in range(3) if other.advance(lambda: 1e-2)] == losses
    assert len(set(losses)) == 3
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name


def test_what_is_not_used_has_no_gradient(model, learner, cores):
    cores(2)
    made, extra = model(dropout=0.0), torch.nn.Parameter(torch.ones(3))
    made.register_parameter("extra", extra)
    one = learner(made)
    one.advance(lambda: 1e-2)
    assert extra.grad is None
    assert extra.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("raised", "told"), [(ValueError, RuntimeError), (UserError, UserError)])
def test_an_error_is_told(model, learner, cores, monkeypatch, raised, told):
    """One for the user as it is, another with the place where it was."""
    cores(2)
    one, here = learner(model(dropout=0.0)), os.getpid()
    learn = one._backward

    def fails(part, count):
        if os.getpid() != here:
            raise raised("a strange batch")
        return learn(part, count)

    monkeypatch.setattr(one, "_backward", fails)
    with pytest.raises(told, match="a strange batch"):
        one.advance(lambda: 1e-2)
    assert torch.get_num_threads() == 2


def test_a_process_that_ends_is_told(model, learner, cores):
    cores(2)
    one = learner(model(dropout=0.0))
    one.advance(lambda: 1e-2)
    process = one._workers._workers[0].process
    os.kill(process.pid, signal.SIGTERM)  # which is for the first process alone
    assert one.advance(lambda: 1e-2)
    process.kill()
    process.join()
    with pytest.raises(UserError, match="has ended"):
        one.advance(lambda: 1e-2)


@pytest.mark.parametrize("end", ["by itself", "killed", "asked", "dropped"])
def test_none_is_left_over(end):
    program = (
        "import torch, time\n"
        "from regard.train.gradients import Gradients\n"
        "from regard.train.workers import Workers\n"
        "weight = torch.nn.Parameter(torch.ones(3))\n"
        "workers = Workers(lambda share, count: [], Gradients([weight]), 2)\n"
        "print(*(worker.process.pid for worker in workers._workers), flush=True)\n"
    )
    program += {"by itself": "", "dropped": "del workers\ntime.sleep(60)"}.get(end, "time.sleep(60)")
    first = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in first.stdout.readline().split()]
    assert len(pids) == 2
    if end == "killed":
        first.kill()
    elif end == "asked":
        first.terminate()
    if end != "dropped":
        first.communicate(timeout=30)
    until = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until, "a process was left over"
        time.sleep(0.05)
    first.kill()
    first.communicate()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_small_steps_are_left_to_one(model, learner, cores, monkeypatch):
    monkeypatch.setattr("regard.train.learner.MIN_WORK_FOR_WORKERS", 1 << 40)
    cores(2)
    one = learner(model(dropout=0.0))
    one.advance(lambda: 1e-2)
    assert one._workers is None


def test_shared_numbers_are_the_same():
    for tensor in (torch.randn(3, 4), torch.randn(()), torch.zeros(0, 3), torch.arange(5)):
        assert torch.equal(workers._shared(tensor), tensor)


# A helper that is stopped, or hangs.


@pytest.fixture
def impatient(monkeypatch):
    """Without the two minutes."""
    monkeypatch.setattr("regard.machine.MAX_IDLE", 3.0)
    monkeypatch.setattr("regard.machine.POLL_SECONDS", 0.1)


@pytest.mark.parametrize("stopped", [[0], [1], [0, 1]])
def test_a_process_that_is_stopped_is_told(model, learner, cores, impatient, stopped):
    """And all are gone, the others too."""
    cores(3)
    one = learner(model(dropout=0.0))
    one.advance(lambda: 1e-2)
    every = [worker.process for worker in one._workers._workers]
    for number in stopped:
        os.kill(every[number].pid, signal.SIGSTOP)
    with pytest.raises(UserError, match=r"helps in training did nothing for 3 seconds.*ended"):
        one.advance(lambda: 1e-2)
    assert torch.get_num_threads() == 3
    for process in every:
        with pytest.raises(ProcessLookupError):  # not even a zombie
            os.kill(process.pid, 0)


PROGRAM = """
import os, signal, sys
from regard import machine
from regard.cli import main
from regard.train import workers, learner

machine.MAX_IDLE, machine.POLL_SECONDS, learner.MIN_WORK_FOR_WORKERS = 3.0, 0.1, 1
scatter, steps = workers.Workers.scatter, iter(range(99))

def given(self, *arguments):
    if next(steps) == 5 and sys.argv[1] == "stop":
        for worker in self._workers:
            os.kill(worker.process.pid, signal.SIGSTOP)
        print("pids", *(worker.process.pid for worker in self._workers), flush=True)
    scatter(self, *arguments)

workers.Workers.scatter = given
sys.exit(main(sys.argv[2:]))
"""


def run(command, *more):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *command, *more], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_run_whose_helper_is_stopped_ends_and_goes_on(pairs, tmp_path):
    out = tmp_path / "run"
    given = ["train", "transformer", "--size", "tiny", "--data", str(pairs), "--tokenizer", "characters,pretokenised"]
    given += [
        "--threads",
        "3",
        "--steps",
        "8",
        "--out",
        str(out),
        "--set",
        "train.save_steps=2",
        "--set",
        "train.batch_tokens=80",
    ]
    given += ["--set", "model.width=8", "--set", "model.heads=2", "--set", "model.depth=1"]
    done = run(["stop"], *given)
    assert done.returncode == 2, done.stderr
    told = done.stderr.strip().splitlines()[-1]
    assert told.startswith("regard: a process that helps in training did nothing for 3 seconds")
    assert f"the last checkpoint: regard train --resume {out}" in told
    assert "Traceback" not in done.stderr
    pids = next(line for line in done.stdout.splitlines() if line.startswith("pids")).split()[1:]
    assert len(pids) == 2
    assert not any(alive(int(pid)) for pid in pids)
    done = run(["go on"], "train", "--resume", str(out))
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stdout
