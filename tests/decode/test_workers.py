"""Several batches at once, by forks or by threads."""

import os
import signal

import pytest

from regard.core import UserError
from regard.decode.workers import at_once

JOBS = [[n] for n in range(7)]
BY = pytest.mark.parametrize("forks", [True, False])


@BY
@pytest.mark.parametrize("many", [1, 2, 3, 20])
def test_every_job_once(many, forks):
    done = list(at_once(JOBS, lambda job: job[0] ** 2, many, forks))
    assert sorted(done) == [(job, job[0] ** 2) for job in JOBS]


@BY
@pytest.mark.parametrize("raised", [UserError, ValueError])
def test_an_error_is_told(raised, forks):
    def work(job):
        if job[0] == 3:
            raise raised("a strange batch")

    with pytest.raises(UserError if raised is UserError else Exception, match="a strange batch"):
        list(at_once(JOBS, work, 2, forks))


def test_a_process_that_ends_is_told():
    def work(job):
        if job[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match=r"helps in decoding.*has ended"):
        list(at_once(JOBS, work, 2, True))


def test_who_has_enough_leaves_nobody_behind():
    jobs = at_once([[os.getpid()] for _ in range(5)], lambda job: os.getpid(), 2, True)
    (first,), helper = next(jobs)
    assert helper != first
    jobs.close()
    with pytest.raises(ProcessLookupError):
        os.kill(helper, 0)
