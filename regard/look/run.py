"""A summary of a run folder: recipe, data, settings, metrics, size, commands and versions."""

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

from .amount import format_count

DATA_KEYS = (
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
    """Return a summary for JSON. run.json and metrics.jsonl may come from anywhere, so their content is not trusted."""
    info = read_run_json(folder)
    job, machine = _as_dict(info.get("job")), _as_dict(info.get("machine"))
    step, metrics = last_metrics(folder / "metrics.jsonl")
    recipe = recipes.load(folder / "recipe.toml")
    sessions = info.get("sessions")
    return {
        "run": short(folder),
        "finished": (folder / checkpoint.MODEL).is_file(),
        "recipe": job.get("recipe") or recipe.get("title"),
        "size": job.get("size"),
        "task": job.get("task") or _as_dict(recipe.get("objective")).get("part", "next_token"),
        "from": job.get("origin") or _as_dict(info.get("origin")).get("family"),
        "lora": job.get("lora") or 0,
        "overrides": job.get("overrides") or [],
        "data": {name: job[name] for name in DATA_KEYS if job.get(name) not in (None, False, "")},
        "train": _as_dict(recipe.get("train")),
        "decode": _as_dict(recipe.get("decode")),
        "step": step,
        "metrics": metrics,
        "parameters": info.get("parameters"),
        "learning": info.get("learning"),
        "machine": machine,
        "sessions": [one for one in sessions if isinstance(one, dict)] if isinstance(sessions, list) else [],
    }


def last_metrics(path: Path) -> tuple[int | None, dict[str, float]]:
    """Return the last logged step, and the metrics of the final model, or else of the last evaluation."""
    step, found = None, {}
    if path.is_file():
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    entry = _as_dict(json.loads(line))
                except (ValueError, RecursionError):
                    continue
                step = entry["step"] if isinstance(entry.get("step"), int) and _is_number(entry["step"]) else step
                found = _as_dict(entry.get("final") or entry.get("dev")) or found
    return step, {name: value for name, value in found.items() if _is_number(value)}


def text(run: dict[str, Any], width: int = 100) -> str:
    """Format the summary for a terminal."""
    changed = {name: value for name, value in run["train"].items() if value != getattr(Settings, name, None)}
    state = "finished" if run["finished"] else "not finished"
    number = {name: run[name] for name in ("parameters", "learning") if isinstance(run[name], int)}
    size = [f"{format_count(value)} {name if name == 'parameters' else 'trainable'}" for name, value in number.items()]
    lines = {
        "run": f"{run['run']}, {state}" + (f" after step {run['step']:,}" if run["step"] is not None else ""),
        "recipe": f"{run['recipe']}" + (f", size {run['size']}" if run["size"] else ""),
        "task": run["task"],
        "from": run["from"],
        "lora": f"rank {run['lora']}" if run["lora"] else "",
        "data": "  ".join(f"{name} {value}" for name, value in run["data"].items()),
        "settings": "  ".join(f"{name} {value}" for name, value in changed.items()),
        "decode": "  ".join(f"{name} {value}" for name, value in run["decode"].items()),
        "metrics": "  ".join(f"{name} {value:.4g}" for name, value in run["metrics"].items()),
        "size": ", ".join(size),
        "machine": ", ".join(f"{name} {value}" for name, value in run["machine"].items()),
    }
    shown = [line for name, value in lines.items() if value for line in _entry(name, str(value), width)]
    for one in run["sessions"]:
        command = one.get("command")
        words = shlex.join(map(str, command)) if isinstance(command, list) else ""
        versions = ", ".join(f"{name} {value}" for name, value in _as_dict(one.get("versions")).items())
        made = "  ".join(str(part) for part in (one.get("time"), words, f"({versions})" if versions else "") if part)
        shown += _entry("made", made, width)
    return "\n".join(shown)


def _entry(name: str, value: str, width: int) -> list[str]:
    gap = " " * 10
    return textwrap.wrap(value, max(width, 40), initial_indent=f"{name:<10}", subsequent_indent=gap,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _is_number(value: Any) -> bool:
    """Whether the value is a number that fits into a float."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
