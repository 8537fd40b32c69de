"""Nothing lost: a run that is killed more than twenty times ends as one that was not, to the last bit."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file

from regard.runs import checkpoint

STEPS, KILLS, SEED = 60, 24, 7


def run_through(job, kills, tmp_path):
    path = tmp_path / f"job-{kills}.json"
    path.write_text(json.dumps(asdict(job)))
    program = Path(__file__).with_name("killing.py")
    command = [sys.executable, program, path, *map(str, (STEPS, kills, SEED))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def told(run):
    """What each line of metrics says, but for the time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def test_killed_again_and_again(job, tmp_path):
    """With dropout, accumulation, a moving average, a mean of checkpoints and a metric that is decoded."""
    settings = {
        "steps": STEPS,
        "save_steps": 3,
        "eval_steps": 5,
        "gradient_accumulation": 2,
        "ema": 0.9,
        "average": 3,
        "label_smoothing": 0.1,
    }
    settings |= {"metric": "token_error", "schedule": "cosine"}
    assert run_through(job("whole", **settings), 0, tmp_path) == {"moment": 0, "line": 0, "writing": 0}
    killed = run_through(job("killed", **settings), KILLS, tmp_path)
    assert sum(killed.values()) >= 20
    assert min(killed.values()) > 0
    whole, again = tmp_path / "whole", tmp_path / "killed"
    assert (whole / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    names = [path.name for path in checkpoint.list_checkpoints(whole / "checkpoints")]
    assert names == [path.name for path in checkpoint.list_checkpoints(again / "checkpoints")]
    for name in names:
        for file in ("model.safetensors", "trainer.safetensors"):
            mine, yours = (load_file(run / "checkpoints" / name / file) for run in (whole, again))
            assert mine.keys() == yours.keys()
            assert all(mine[key].equal(yours[key]) for key in mine), (name, file)
    assert [line["step"] for line in told(again) if "lr" in line] == list(range(1, STEPS + 1))
    assert told(again) == told(whole)
    left = [path.name for path in again.rglob("*") if ".part" in path.name or path.name.startswith(".")]
    assert not left
