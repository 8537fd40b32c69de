"""Ctrl-C while regard starts, and while it learns a tokenizer: one line, exit code 130, nothing left behind. Those who
import regard keep their own way with signals."""

import os
import random
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from regard import machine
from regard.cli import main
from regard.data import Tokenizer, pieces

ROOT = Path(__file__).parent.parent
ENTRY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["regard"]
INSTALLED = "import sys; from {} import {} as main; sys.exit(main())".format(*ENTRY.split(":"))
PROGRAMS = {"module": ["-m", "regard"], "installed": ["-c", INSTALLED]}
TORCH = {
    "plain": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n",
    "swallowed": "import os, signal, time\n"
    "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)\n"
    "except BaseException:\n    raise ImportError('torch cannot be imported')\n",
}


def start(program, *arguments, path=ROOT, **more):
    there = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (path, ROOT))), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        env=there, capture_output=True, text=True, timeout=120, check=False, **more,
    )  # fmt: skip


@pytest.fixture(params=TORCH)
def torch(request, tmp_path):
    """One whose import is broken off."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH[request.param])
    return tmp_path


@pytest.mark.parametrize("program", PROGRAMS)
def test_while_it_starts(program, torch):
    done = start(PROGRAMS[program], "settings", path=torch)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "regard: stopped\n")


def test_behind_nohup_it_starts(torch):
    """Where Ctrl-C is ignored it stays so."""
    (torch / "torch" / "__init__.py").write_text(TORCH["plain"].replace("time.sleep(60)", "print('here')\nos._exit(7)"))
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    done = start(["-c", ignore + INSTALLED], "settings", path=torch)
    assert (done.returncode, done.stdout) == (7, "here\n")


def test_a_host_keeps_its_handler(torch):
    """And gets KeyboardInterrupt while it imports."""
    code = (
        "try:\n    import regard\n    regard.build\n"
        "except (KeyboardInterrupt, ImportError) as error:\n    print(type(error))"
    )
    done = start(["-c", code], path=torch)
    assert done.returncode == 0, done.stderr
    assert done.stdout in ("<class 'KeyboardInterrupt'>\n", "<class 'ImportError'>\n")


def test_the_handler_is_as_before():
    before = signal.getsignal(signal.SIGINT)
    assert main(["--version"]) == 0
    assert signal.getsignal(signal.SIGINT) is before


LEARNING = """
import os, signal, sys, threading
from regard.data import pieces, tokenizer

counted, interruptible = pieces._count_characters, tokenizer.interruptible

def stopped(*given):
    yield from counted(*given)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()  # when the library is at work

def told(work):
    def learn():
        try:
            return work()
        finally:
            os.write(2, b"waited for the library\\n")
    return interruptible(learn)

pieces._count_characters, tokenizer.interruptible = stopped, told
"""


def test_while_a_tokenizer_is_learned(tmp_path):
    rng, data = random.Random(1), tmp_path / "long.txt"
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 14))) for _ in range(40_000)]
    data.write_text("\n".join(" ".join(words[at : at + 20]) for at in range(0, len(words), 20)))
    given = ["train", "gpt2", "--size", "tiny", "--data", data, "--tokenizer", "unigram", "--steps", "2"]
    done = start(["-c", LEARNING + INSTALLED], *given, "--out", tmp_path / "runs" / "x")
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines() == ["regard: stopped"]
    assert not (tmp_path / "runs" / "x").exists()


@pytest.fixture
def learned_in(monkeypatch):
    """The threads in which tokenizers are learned."""
    seen, counted = [], pieces._count_characters

    def watched(*given):
        seen.append(threading.current_thread())
        return counted(*given)

    monkeypatch.setattr(pieces, "_count_characters", watched)
    return seen


def test_a_host_learns_one_where_it_is(learned_in):
    Tokenizer.train("characters", ["a text"])
    assert learned_in == [threading.main_thread()]


def test_on_the_command_line_errors_come_through(learned_in):
    with machine.command_line():
        made = Tokenizer.train("characters", ["a text"])
        with pytest.raises(ValueError, match="there is no text"):
            Tokenizer.train("characters", [])
    assert made.size == 4 + len(set("a text"))
    assert threading.main_thread() not in learned_in
    assert len(learned_in) == 2
