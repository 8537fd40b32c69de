"""A guest in the host's process: importing regard, loading a run and predicting, from eight threads at once, leave
everything there as it was. `regard.machine.tune()` is the host's to call."""

import json
import subprocess
import sys

import pytest

from regard.cli import main

HOST = """
import ctypes, gc, json, os, random, signal, sys, threading
import numpy, torch

def refuse(*given):
    raise RuntimeError("the host was forked")

os.register_at_fork(before=refuse)
signal.signal(signal.SIGUSR1, lambda *given: None)
signal.signal(signal.SIGINT, lambda *given: None)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
torch.set_num_threads(2)
random.seed(5), numpy.random.seed(6), torch.manual_seed(7)
library = ctypes.CDLL(None)

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

library.mallinfo2.restype = Mallinfo
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]

def has_own_pages():
    "Whether a large block comes straight from the system, as malloc has it by default."
    before = library.mallinfo2().hblks
    block = library.malloc(200 << 20)
    after = library.mallinfo2().hblks
    library.free(block)
    return after - before

def state():
    return {
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(one)) for one in sorted(signal.valid_signals())],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "random": [str(random.getstate()), str(numpy.random.get_state()), str(torch.get_rng_state().tolist())],
        "garbage": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "malloc": has_own_pages(),
        "grad": torch.is_grad_enabled(),
        "folder": os.getcwd(),
        "hooks": [str(sys.excepthook), str(threading.excepthook)],
    }

before = state()
import regard
from regard.decode import DecodeConfig
run = regard.load(sys.argv[1])
texts = [" ".join(random.Random(i).choices("abcdefgh", k=1 + i % 6)) for i in range(60)]
alone = [answers[0].text for answers in run.predict(texts, DecodeConfig(beam=2))]
found = [None] * 8

def work(which):
    found[which] = [answers[0].text for answers in run.predict(texts, DecodeConfig(beam=2))]

threads = [threading.Thread(target=work, args=(which,)) for which in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
after = state()
changed = [key for key in before if before[key] != after[key]]
print(json.dumps({"changed": changed, "same": all(one == alone for one in found)}))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("guest")
    rows = [f"{a} {b}\t{b} {a}" for a in "abcdefgh" for b in "abcdefgh"]
    (place / "pairs.tsv").write_text("\n".join(rows) + "\n")
    given = ["train", "transformer", "--size", "tiny", "--data", str(place / "pairs.tsv"), "--tokenizer", "words"]
    given += ["--steps", "3", "--set", "model.width=16", "--set", "model.depth=1", "--out", str(place / "run")]
    assert main(given) == 0
    return place / "run"


@pytest.mark.skipif(sys.platform != "linux", reason="mallinfo2 is glibc's")
def test_the_host_stays_as_it_was(run):
    done = subprocess.run([sys.executable, "-c", HOST, str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"changed": [], "same": True}


@pytest.mark.skipif(sys.platform != "linux", reason="mallinfo2 is glibc's")
def test_a_host_that_tunes_is_seen_to_change(run):
    """The check itself."""
    tuned = HOST.replace("import regard\n", "import regard\nfrom regard.machine import tune\ntune()\n")
    tuned = tuned.replace("os.register_at_fork(before=refuse)\n", "")
    done = subprocess.run([sys.executable, "-c", tuned, str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "malloc" in json.loads(done.stdout)["changed"]
