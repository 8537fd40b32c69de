"""Trains one job to its end while killing it again and again; run as a program by test_killed.py.

killing.py JOB.json STEPS KILLS SEED: prints how often it was killed and how. Every attempt is a process of its own,
forked from this one, which has everything imported already. It is killed by SIGKILL, in a random one of these ways:

    at a random moment, by its parent, a little after it told of a random step
    at a random line of regard/train, by itself: between two files of a checkpoint, in the middle of a line of metrics
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer would import it, in every attempt anew

torch.set_num_threads(1)  # no threads, so that fork is safe
os.fsync = lambda file: None  # a kill of the process, not of the machine

from regard import runs, tasks, train  # noqa: E402
from regard.runs.job import Job  # noqa: E402
from regard.train.job import resume, start  # noqa: E402

OWN = tuple(str(Path(folder.__file__).parent) for folder in (runs, tasks, train))
WRITING = str(Path(runs.__file__).parent / "checkpoint.py")


def attempt(job, pipe, line):
    """line: (paths, count): die when so many lines of files whose path begins so were executed."""
    torch.manual_seed(random.SystemRandom().randrange(10**9))  # what a new process happens to have
    if line:
        left = line[1]

        def trace(frame, event, argument):
            if not frame.f_code.co_filename.startswith(line[0]):
                return None

            def at(frame, event, argument):
                nonlocal left
                left -= event == "line"
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return at

            return at

        sys.settrace(trace)
    again = (Path(job.run) / "run.json").exists()
    prepared = resume(job.run, say=lambda s: None) if again else start(job, say=lambda s: None)
    prepared.train(lambda progress: os.write(pipe, b"."))


def kill_at_a_moment(child, pipe, chance):
    """After a few steps, somewhere in the next one and a half; or before the first."""
    wanted, times = chance.choice((0, 2, 4, 6)), [time.perf_counter()]
    while len(times) <= wanted and os.read(pipe, 1):
        times.append(time.perf_counter())
    time.sleep(chance.uniform(0, 1.5 * (times[-1] - times[-2]) if wanted else 0.2))
    os.kill(child, signal.SIGKILL)


def main(job, steps, kills, seed):
    chance = random.Random(seed)
    killed = {"moment": 0, "line": 0, "writing": 0}
    while True:
        count = sum(killed.values())
        kept = [int(path.name[5:13]) for path in Path(job.run).glob("checkpoints/step-*")]
        reach = 3 if max(kept, default=0) / steps < count / (kills or 1) - 0.1 else 1  # so that kills come all along
        how = chance.choice(list(killed)) if count < kills else "none"
        line = {"line": (OWN, chance.randint(1, reach * 1500)), "writing": (WRITING, chance.randint(1, reach * 300))}
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            attempt(job, writing, line.get(how))
            os._exit(0)
        os.close(writing)
        if how == "moment":
            kill_at_a_moment(child, reading, chance)
        _, status = os.waitpid(child, 0)
        os.close(reading)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            killed[how] += 1
        elif status:
            sys.exit(f"it failed by itself: {status}")
        else:
            return killed


if __name__ == "__main__":
    path, steps, kills, seed = sys.argv[1:]
    print(json.dumps(main(Job(**json.loads(Path(path).read_text())), int(steps), int(kills), int(seed))))
