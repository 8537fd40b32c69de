"""Several batches at once, by forks or by threads."""

import os
import signal
import time

import pytest

from regard.core import UserError
from regard.decode.workers import run_parallel
from regard.machine import Fork

JOBS = [[n] for n in range(7)]
BY = pytest.mark.parametrize("forks", [True, False])


@BY
@pytest.mark.parametrize("many", [1, 2, 3, 20])
def test_every_job_once(many, forks):
    done = list(run_parallel(JOBS, lambda job: job[0] ** 2, many, forks))
    assert sorted(done) == [(job, job[0] ** 2) for job in JOBS]


@BY
@pytest.mark.parametrize("raised", [UserError, ValueError])
def test_an_error_is_told(raised, forks):
    def work(job):
        if job[0] == 3:
            raise raised("a strange batch")

    with pytest.raises(UserError if raised is UserError else Exception, match="a strange batch"):
        list(run_parallel(JOBS, work, 2, forks))


def test_a_process_that_ends_is_told():
    def work(job):
        if job[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match=r"helps in decoding.*has ended"):
        list(run_parallel(JOBS, work, 2, True))


def test_who_has_enough_leaves_nobody_behind():
    jobs = run_parallel([[os.getpid()] for _ in range(5)], lambda job: os.getpid(), 2, True)
    (first,), helper = next(jobs)
    assert helper != first
    jobs.close()
    with pytest.raises(ProcessLookupError):
        os.kill(helper, 0)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("regard.machine.MAX_IDLE", 3.0)
    monkeypatch.setattr("regard.machine.POLL_SECONDS", 0.1)


@pytest.fixture(autouse=True)
def _in_time():
    """A test that waits for ever fails instead."""

    def late(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("how", ["stopped", "waits"])
def test_a_process_that_does_nothing_is_told(impatient, how, tmp_path):
    def work(job):
        if job[0] == 3:
            (tmp_path / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP) if how == "stopped" else time.sleep(600)

    with pytest.raises(UserError, match=r"helps in decoding did nothing for 3 seconds.*ended"):
        list(run_parallel(JOBS, work, 2, True))
    with pytest.raises(ProcessLookupError):  # not even a zombie
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_long_work_is_waited_for(impatient):
    """However long, as long as it is work: here longer than the three seconds after which an idle one is given up."""

    def work(job):
        until = time.process_time() + (4 if job[0] == 0 else 0)
        while time.process_time() < until:
            pass
        return job[0]

    assert sorted(done for _, done in run_parallel(JOBS[:2], work, 2, True)) == [0, 1]


@pytest.mark.parametrize("size", [1 << 10, 1 << 24])
def test_a_process_that_does_not_listen_is_told(impatient, size):
    """Not even when what it is told is more than the line between holds."""
    helper = Fork(len, [], "a test")
    helper.send("three")
    assert helper.recv() == 5
    os.kill(helper.process.pid, signal.SIGSTOP)
    with pytest.raises(UserError, match=r"helps in a test did nothing for 3 seconds"):
        _ = helper.send(bytes(size)), helper.recv()
    with pytest.raises(ProcessLookupError):
        os.kill(helper.process.pid, 0)


def test_an_answer_that_breaks_off_is_told(impatient):
    """Stopped in the middle of saying it."""
    helper = Fork(bytes, [], "a test")
    helper.send(1 << 26)
    assert helper.line.poll(30)
    os.kill(helper.process.pid, signal.SIGSTOP)
    with pytest.raises(UserError, match=r"helps in a test did nothing for 3 seconds"):
        helper.recv()


def test_a_closed_helper_is_gone():
    helper = Fork(len, [], "a test")
    os.kill(helper.process.pid, signal.SIGSTOP)
    helper.close()
    with pytest.raises(ProcessLookupError):
        os.kill(helper.process.pid, 0)
