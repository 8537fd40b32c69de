"""A trained model that tells the classes of a graph's nodes.

run = regard.load("runs/gat-1")
run.label(open_graph("cora.npz"))       # (nodes,) the likeliest class of each
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard import metrics as measures
from regard.core import Model, UserError
from regard.data.graph import Graph, Nodes, open_graph
from regard.decode import DecodeConfig
from regard.parts.objectives.nodes import measured

INSTEAD = "this model tells the classes of a graph's nodes: measure it by `regard evaluate`, or ask run.label(graph)"


class NodeLabeller:
    """As a Run is of texts."""

    pairs = False
    takes, options = "texts", ()
    metrics = ("loss", "accuracy")  # what tells how good it is

    def __init__(self, model: Model, folder: Path | None = None, note: str = ""):
        self.model, self.folder, self.note = model.eval(), folder, note
        self.device = next(model.parameters()).device
        self.config = DecodeConfig()

    @torch.no_grad()
    def label(self, graph: Graph) -> Tensor:
        """(nodes,) the likeliest class of each."""
        batch = graph.train.batch.to(self.device)
        return self.model(batch.tokens, pattern=batch.pattern)[0].argmax(-1).cpu()

    def evaluate(self, nodes: Nodes, metrics: Sequence[str]) -> dict[str, Any]:
        """As regard.evaluate tells it: accuracy in percent."""
        measures.check(metrics, self.metrics)
        begun = time.perf_counter()
        found = measured(self.model, nodes.batch.to(self.device))
        scores = {name: found[name] for name in metrics}
        counts = {"nodes": len(nodes.numbers)}
        seconds = {"nodes": time.perf_counter() - begun}
        return {"scores": scores, "signatures": {}, "counts": counts, "seconds": seconds}

    def examples(self, asked: dict[str, Any], part: str) -> Nodes:
        """Those of a graph's nodes that are for train, dev or test."""
        nodes = getattr(open_graph(asked["data"]), part)
        if nodes is None:
            raise UserError(f"this graph says of no node that it is for {part}")
        return nodes

    def answers(self, texts: Iterable[str], *_: Any) -> Iterator[Any]:
        raise UserError(INSTEAD)

    predict = stream = answers
