"""A graph whose nodes have classes: an encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.core import Model, UserError
from regard.data import Corpus, Tokenizer
from regard.data.graph import open_graph
from regard.parts.objectives.nodes import Nodes, measured
from regard.parts.objectives.objective import Objective
from regard.runs.checkpoint import put
from regard.use.nodes import NodeLabeller

from .task import Say, Task, Tick


class GraphNodes(Task):
    reads = "graph"
    forced = ("loss", "accuracy")
    decisive = "accuracy"
    files = "graph"

    @property
    def tokenizers(self) -> list[Tokenizer]:
        return []

    def open(self, tick: Callable[[int], None]) -> Any:
        job = self.job
        for name in ("source", "target", "dev", "test", "columns", "header", "tokenizer"):
            if getattr(job, name) is not None:
                raise UserError(f"a graph says by itself what is what, so there is no {name} to give")
        if job.data is None:
            raise UserError("which graph? Give data=, an .npz file or a folder with one")
        self.graph = open_graph(job.data)
        return self.graph

    def learn(self, corpus: Corpus, tick: Tick) -> None:
        """A graph has no tokens."""

    def complete(self, recipe: dict[str, Any]) -> None:
        recipe["vocab"] = self.graph.channels
        head = recipe["model"].get("head", "tag")
        recipe["model"]["head"] = ({"part": head} if isinstance(head, str) else head) | {"classes": self.graph.classes}

    def objective(self) -> Objective:
        return Nodes(self.settings.label_smoothing)

    def batches(self, model: Model, corpus: Any, say: Say, tick: Tick) -> Any:
        return self._noted(corpus.train, "train.graph")

    def dev(self, model: Model, lines: Any) -> Any:
        batch = self._noted(lines, "dev.graph").batch.to(next(model.parameters()).device)
        return lambda model: measured(model, batch)

    def _noted(self, nodes: Any, name: str) -> Any:
        """What is seen and asked is the same in a run that goes on."""
        self.data("").mkdir(parents=True, exist_ok=True)
        put(self.data(name), nodes.digest())
        return nodes

    def run(self, model: Model, folder: Path | None, documents: bool) -> Any:
        return NodeLabeller(model, folder)
