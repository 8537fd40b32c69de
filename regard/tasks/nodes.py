"""Classify the nodes of a graph: an encoder learns from nodes whose classes are known.

run = regard.load("runs/gat-1")
run.label(open_graph("cora.npz"))       # (nodes,) the most likely class of each
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard import metrics as measures
from regard.core import Model, UserError
from regard.data import Corpus, Tokenizer
from regard.data import graph as graphs
from regard.decode import DecodeConfig
from regard.parts.objectives.nodes import Nodes, node_metrics
from regard.parts.objectives.objective import Objective
from regard.runs.checkpoint import write_atomically

from .task import Say, Task, Tick

NO_TEXTS = "this model predicts the classes of a graph's nodes: use `regard evaluate`, or run.label(graph)"


class NodeClassifier:
    """Predicts the classes of the nodes of a graph; the counterpart of `Run`."""

    pairs = False
    takes, options = "texts", ()
    metrics = ("loss", "accuracy")

    def __init__(self, model: Model, folder: Path | None = None, note: str = ""):
        self.model, self.folder, self.note = model.eval(), folder, note
        self.device = next(model.parameters()).device
        self.config = DecodeConfig()

    @torch.no_grad()
    def label(self, graph: graphs.Graph) -> Tensor:
        """Return the most likely class of each node, (nodes,)."""
        batch = graph.train.batch.to(self.device)
        return self.model(batch.tokens, pattern=batch.pattern)[0].argmax(-1).cpu()

    def evaluate(self, nodes: graphs.Nodes, metrics: Sequence[str]) -> dict[str, Any]:
        """Return the result of regard.evaluate; accuracy is in percent."""
        measures.check(metrics, self.metrics)
        begun = time.perf_counter()
        found = node_metrics(self.model, nodes.batch.to(self.device))
        scores = {name: found[name] for name in metrics}
        counts = {"nodes": len(nodes.numbers)}
        seconds = {"nodes": time.perf_counter() - begun}
        return {"scores": scores, "signatures": {}, "counts": counts, "seconds": seconds}

    def examples(self, asked: dict[str, Any], part: str) -> graphs.Nodes:
        """Return the nodes of a graph that are for train, dev or test."""
        nodes = getattr(graphs.open_graph(asked["data"]), part)
        if nodes is None:
            raise UserError(f"this graph says of no node that it is for {part}")
        return nodes

    def answers(self, texts: Iterable[str], *_: Any) -> Iterator[Any]:
        raise UserError(NO_TEXTS)

    predict = stream = answers


class GraphNodes(Task):
    objective_name = "nodes"
    predictor = NodeClassifier
    reads = "graph"
    loss_metrics = ("loss", "accuracy")
    default_metric = "accuracy"
    file_suffix = "graph"

    @property
    def tokenizers(self) -> list[Tokenizer]:
        return []

    def open(self, tick: Callable[[int], None]) -> Any:
        job = self.job
        for name in ("source", "target", "dev", "test", "columns", "header", "tokenizer"):
            if getattr(job, name) is not None:
                raise UserError(f"the file of a graph holds everything, so there is no {name} to give")
        if job.data is None:
            raise UserError("which graph? Give --data, an .npz file or a folder with one")
        self.graph = graphs.open_graph(job.data)
        return self.graph

    def learn_tokenizers(self, corpus: Corpus, tick: Tick) -> None:
        """Do nothing: a graph has no tokens."""

    def complete_recipe(self, recipe: dict[str, Any]) -> None:
        recipe["vocab"] = self.graph.channels
        head = recipe["model"].get("head", "tag")
        recipe["model"]["head"] = ({"part": head} if isinstance(head, str) else head) | {"classes": self.graph.classes}

    def objective(self) -> Objective:
        return Nodes(self.settings.label_smoothing)

    def batches(self, model: Model, corpus: Any, say: Say, tick: Tick) -> Any:
        return self._store_digest(corpus.train, "train.graph")

    def dev(self, model: Model, lines: Any) -> Any:
        batch = self._store_digest(lines, "dev.graph").batch.to(next(model.parameters()).device)
        return lambda model: node_metrics(model, batch)

    def _store_digest(self, nodes: Any, name: str) -> Any:
        """Store a hash of the data, so that a resumed run can check that it is unchanged."""
        self.data_path("").mkdir(parents=True, exist_ok=True)
        write_atomically(self.data_path(name), nodes.digest())
        return nodes

    def make_predictor(self, model: Model, folder: Path | None, documents: bool) -> Any:
        return NodeClassifier(model, folder)
