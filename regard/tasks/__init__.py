"""One task per file: what its data looks like, the head, the objective, the metrics, and how predictions are made.

A task is found by its file: every class here with an `objective_name` is one, and there is no list of them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from regard.core import Embed, Model, UserError, find
from regard.errors import nearest, shown

from .task import Say, Task, Tick, no_progress

__all__ = ["Say", "Task", "Tick", "no_progress", "predictor_for", "task_of"]


@cache
def every_task() -> list[type[Task]]:
    """Return all tasks in the files of this folder."""
    files = sorted(Path(__file__).parent.glob("[a-z]*.py"))
    modules = [import_module(f".{file.stem}", __name__) for file in files]
    own = [
        one for module in modules for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__
    ]
    return [one for one in own if isinstance(one, type) and issubclass(one, Task) and "objective_name" in vars(one)]


def task_of(recipe: dict[str, Any], name: str) -> type[Task]:
    """Return the task of a recipe, by its objective, its kind of model and what its embedding reads. name: of the
    recipe."""
    objective, kind = recipe.get("objective", {}).get("part", "next_token"), recipe["model"].get("kind")
    embed = recipe["model"].get("embed", "tokens")
    if not isinstance(embed, str | dict):
        raise UserError(f"recipe '{name}': model.embed is {shown(embed)}, and should be a part's name or a table")
    reads = find(Embed, embed if isinstance(embed, str) else embed.get("part", "tokens")).reads
    found = [one for one in _tasks(objective, reads) if one.trainable and one.kind in ("", kind)]
    if not found:
        raise UserError(f"recipe '{name}' has the objective '{objective}', which a model of kind '{kind}' cannot learn")
    return found[0]


def predictor_for(model: Model) -> Any:
    """Return the class that makes predictions with such a model."""
    objective = getattr(model, "recipe", {}).get("objective", {}).get("part", "next_token")
    reads = getattr(getattr(model, "embed", None), "reads", "text")
    found = _tasks(objective, reads)
    if not found:
        near = nearest(str(objective), {one.objective_name for one in every_task()})
        raise UserError(f"recipe.toml: objective.part is {shown(objective)}, which is unknown{near}")
    return found[0].predictor


def _tasks(objective: Any, reads: str) -> list[type[Task]]:
    """Return the tasks with this objective, those that require what the embedding reads first."""
    found = [one for one in every_task() if one.learns(objective) and one.inputs in ("", reads)]
    return sorted(found, key=lambda one: not one.inputs)
