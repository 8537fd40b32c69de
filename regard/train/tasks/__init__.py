"""What a run learns from, a file for each: how its corpus becomes tokens and batches, and what it is measured by."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from regard.core import Embed, UserError, find
from regard.errors import shown

from .task import Say, Task, Tick, unseen

__all__ = ["Say", "Task", "Tick", "task_of", "unseen"]

TASKS = {  # objective, and where it matters the kind of model or what it reads -> module and class
    "next_token encoder-decoder": "pairs.Pairs",
    "next_token decoder": "text.Text",
    "classify": "labels.Labels",
    "classify images": "images.Images",
    "contrastive towers": "captions.Captions",
    "match": "match.Matches",
    "tag": "tag.Tags",
    "masked encoder": "masked.MaskedText",
    "nodes": "nodes.GraphNodes",
    "transcribe encoder-decoder": "sounds.Sounds",
    "span_corruption encoder-decoder": "spans.Spans",
    "segments decoder": "segments.SegmentedText",
    "permuted encoder": "permuted.PermutedText",
}


def task_of(recipe: dict[str, Any], name: str) -> type[Task]:
    """By the recipe's objective, its kind and what it reads."""
    objective, kind = recipe.get("objective", {}).get("part", "next_token"), recipe["model"].get("kind")
    embed = recipe["model"].get("embed", "tokens")
    if not isinstance(embed, str | dict):
        raise UserError(f"recipe '{name}': model.embed is {shown(embed)}, and should be a part's name or a table")
    reads = find(Embed, embed if isinstance(embed, str) else embed.get("part", "tokens")).reads
    found = TASKS.get(f"{objective} {kind}") or TASKS.get(f"{objective} {reads}") or TASKS.get(objective)
    if found is None:
        raise UserError(f"recipe '{name}' has the objective '{objective}', which a model of kind '{kind}' cannot learn")
    module, _, task = found.partition(".")
    return getattr(import_module(f".{module}", __name__), task)
