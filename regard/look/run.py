"""What a run folder holds and how it came to be: recipe, data, settings, metrics, size, commands and versions."""

from __future__ import annotations

import json
import shlex
import textwrap
from pathlib import Path
from typing import Any

from regard.errors import short
from regard.files import recipe as recipes
from regard.runs import checkpoint
from regard.runs.folder import read_run_json
from regard.runs.settings import Settings

from .amount import amount

DATA = (
    "data",
    "source",
    "target",
    "dev",
    "test",
    "columns",
    "header",
    "tokenizer",
    "vocab",
    "lowercase",
    "any_reference",
)


def describe(folder: Path) -> dict[str, Any]:
    """What can be told as JSON. run.json and metrics.jsonl may come from anywhere, so nothing in them is relied on."""
    told = read_run_json(folder)
    job, machine = _table(told.get("job")), _table(told.get("machine"))
    step, metrics = measured(folder / "metrics.jsonl")
    recipe = recipes.load(folder / "recipe.toml")
    sessions = told.get("sessions")
    return {
        "run": short(folder),
        "finished": (folder / checkpoint.MODEL).is_file(),
        "recipe": job.get("recipe") or recipe.get("title"),
        "size": job.get("size"),
        "task": job.get("task") or _table(recipe.get("objective")).get("part", "next_token"),
        "from": job.get("origin") or _table(told.get("origin")).get("family"),
        "lora": job.get("lora") or 0,
        "overrides": job.get("overrides") or [],
        "data": {name: job[name] for name in DATA if job.get(name) not in (None, False, "")},
        "train": _table(recipe.get("train")),
        "decode": _table(recipe.get("decode")),
        "step": step,
        "metrics": metrics,
        "parameters": told.get("parameters"),
        "learning": told.get("learning"),
        "machine": machine,
        "sessions": [one for one in sessions if isinstance(one, dict)] if isinstance(sessions, list) else [],
    }


def measured(path: Path) -> tuple[int | None, dict[str, float]]:
    """The last step that is told of, and the metrics of the final model, or else of the last evaluation."""
    step, found = None, {}
    if path.is_file():
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    told = _table(json.loads(line))
                except (ValueError, RecursionError):
                    continue
                step = told["step"] if isinstance(told.get("step"), int) and _number(told["step"]) else step
                found = _table(told.get("final") or told.get("dev")) or found
    return step, {name: value for name, value in found.items() if _number(value)}


def text(run: dict[str, Any], width: int = 100) -> str:
    """The same for a terminal."""
    plain = {name: value for name, value in run["train"].items() if value != getattr(Settings, name, None)}
    state = "finished" if run["finished"] else "not finished"
    number = {name: run[name] for name in ("parameters", "learning") if isinstance(run[name], int)}
    size = [f"{amount(value)} {name if name == 'parameters' else 'of them learned'}" for name, value in number.items()]
    lines = {
        "run": f"{run['run']}, {state}" + (f" after step {run['step']:,}" if run["step"] is not None else ""),
        "recipe": f"{run['recipe']}" + (f", size {run['size']}" if run["size"] else ""),
        "task": run["task"],
        "from": run["from"],
        "lora": f"rank {run['lora']}" if run["lora"] else "",
        "data": "  ".join(f"{name} {value}" for name, value in run["data"].items()),
        "settings": "  ".join(f"{name} {value}" for name, value in plain.items()),
        "decode": "  ".join(f"{name} {value}" for name, value in run["decode"].items()),
        "metrics": "  ".join(f"{name} {value:.4g}" for name, value in run["metrics"].items()),
        "size": ", ".join(size),
        "machine": ", ".join(f"{name} {value}" for name, value in run["machine"].items()),
    }
    shown = [line for name, value in lines.items() if value for line in _entry(name, str(value), width)]
    for one in run["sessions"]:
        command = one.get("command")
        words = shlex.join(map(str, command)) if isinstance(command, list) else ""
        versions = ", ".join(f"{name} {value}" for name, value in _table(one.get("versions")).items())
        made = "  ".join(str(part) for part in (one.get("time"), words, f"({versions})" if versions else "") if part)
        shown += _entry("made", made, width)
    return "\n".join(shown)


def _entry(name: str, value: str, width: int) -> list[str]:
    gap = " " * 10
    return textwrap.wrap(value, max(width, 40), initial_indent=f"{name:<10}", subsequent_indent=gap,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _number(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
