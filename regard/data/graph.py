"""Read a graph: the features, edges and classes of its nodes, and which nodes are for training, dev and test.

cora.npz   edges (edges, 2)   labels (nodes,)   train_idx val_idx test_idx
           features (nodes, channels), or sparse: feat_row feat_col feat_val feat_shape

A node whose label is -1 has no known class: its neighbors attend to it, and it is never a target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regard.core import Pattern, UserError, find
from regard.errors import in_one_line, short

from .arrays import read_arrays
from .batches import IGNORE, Batch

SPLITS = {"train": "train_idx", "dev": "val_idx", "test": "test_idx"}
PIECES = ("feat_row", "feat_col", "feat_val", "feat_shape")


@dataclass(frozen=True)
class Graph:
    """A graph with the classes of its nodes.

    features: (nodes, channels), sparse where the file is.
    labels:   (nodes,) the class of each, counted from 0; -1: unknown.
    pattern:  the edges, each in both directions.
    parts:    the indices of the train, dev and test nodes that have a class.
    left_out: the number of nodes of these parts that have none.
    """

    name: str
    features: Tensor
    labels: Tensor
    pattern: Pattern
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    left_out: int = 0

    @property
    def notes(self) -> list[str]:
        """Return sentences about the graph for the user."""
        counts = ", ".join(f"{len(numbers):,} for {part}" for part, numbers in self.parts.items())
        edges = self.pattern.edges(len(self.labels)).shape[1]
        notes = [f"{self.name}: {len(self.labels):,} nodes, {edges:,} directed edges, {self.classes} classes; {counts}"]
        if self.left_out:
            which = "one node has" if self.left_out == 1 else f"{self.left_out:,} nodes have"
            notes.append(f"{self.name}: {which} no class (-1) and cannot be asked for")
        return notes

    @property
    def train(self) -> Nodes:
        return Nodes(self, "train")

    @property
    def dev(self) -> Nodes | None:
        return Nodes(self, "dev") if "dev" in self.parts else None

    @property
    def test(self) -> Nodes | None:
        return Nodes(self, "test") if "test" in self.parts else None

    @property
    def channels(self) -> int:
        return self.features.shape[1]

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1


def open_graph(path: str | Path) -> Graph:
    """Return the graph of an .npz file, or of a folder that holds one."""
    files = _files(Path(path))
    if len(files) != 1:
        count = f"{len(files)} of them: give the file itself" if files else "none"
        raise UserError(f"a graph is an .npz file, and {short(path)} holds {count}")
    arrays = read_arrays(files[0])
    try:
        return _build_graph(short(files[0]), arrays)
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{short(files[0])} cannot be read as a graph: {in_one_line(error)}") from None


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.npz"))
    return [path] if path.suffix == ".npz" and path.is_file() else []


def _build_graph(name: str, arrays: Mapping[str, np.ndarray]) -> Graph:
    features = _features(name, arrays)
    nodes = len(features)
    labels = _numbers(name, arrays, "labels", 1, least=-1)
    if len(labels) != nodes:
        raise UserError(f"{name}: {nodes} nodes have features and {len(labels)} have labels")
    edges = _numbers(name, arrays, "edges", 2, nodes)
    if edges.shape[1] != 2:
        raise UserError(f"{name}: edges is {edges.shape}, and should be (edges, 2): the two ends of each")
    parts = {
        part: _numbers(name, arrays, key, 1, nodes) for part, key in SPLITS.items() if part == "train" or key in arrays
    }
    labelled = {part: numbers[labels[numbers] >= 0] for part, numbers in parts.items()}
    for part, numbers in labelled.items():
        if not len(numbers):
            raise UserError(f"{name}: no node for {part} has a class: all their labels are -1")
    left_out = sum(len(numbers) for numbers in parts.values()) - sum(len(numbers) for numbers in labelled.values())
    both = torch.from_numpy(np.concatenate((edges, edges[:, ::-1])).T.astype(np.int64))
    pattern = find(Pattern, "edges")(both)  # type: ignore[call-arg]
    return Graph(name, features, torch.from_numpy(labels.astype(np.int64)), pattern, labelled, left_out)


def _features(name: str, arrays: Mapping[str, np.ndarray]) -> Tensor:
    """Return the features, (nodes, channels) in float32."""
    if "features" in arrays:
        dense = np.asarray(arrays["features"], dtype=np.float32)
        if dense.ndim != 2:
            raise UserError(f"{name}: features is {dense.shape}, and should be (nodes, channels)")
        return torch.from_numpy(dense)
    row, col, value, shape = (_array(name, arrays, key) for key in PIECES)
    if shape.shape != (2,) or not row.shape == col.shape == value.shape == (len(row),):
        raise UserError(f"{name}: feat_row, feat_col, feat_val should be of one length, and feat_shape two numbers")
    nodes, channels = (int(n) for n in shape)
    row, col = (_numbers(name, arrays, key, 1, most) for key, most in (("feat_row", nodes), ("feat_col", channels)))
    places, values = torch.from_numpy(np.stack((row, col)).astype(np.int64)), torch.from_numpy(value.astype(np.float32))
    return torch.sparse_coo_tensor(places, values, (nodes, channels), check_invariants=True).coalesce()


def _array(name: str, arrays: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    if key not in arrays:
        raise UserError(f"{name} holds no '{key}', but {', '.join(sorted(arrays)) or 'nothing'}")
    return arrays[key]


def _numbers(
    name: str, arrays: Mapping[str, np.ndarray], key: str, dims: int, below: int | None = None, least: int = 0
) -> np.ndarray:
    """Return an array of integers, checked to be at least `least` and less than `below`."""
    found = _array(name, arrays, key)
    if found.ndim != dims or not np.issubdtype(found.dtype, np.integer) or not found.size:
        raise UserError(f"{name}: {key} should be whole numbers in {dims} dimension{'s' * (dims > 1)}, at least one")
    if found.min() < least or (below is not None and found.max() >= below):
        most = "" if below is None else f" to {below - 1}"
        raise UserError(f"{name}: {key} reaches from {found.min()} to {found.max()}, and should from {least}{most}")
    return found


class Nodes:
    """The whole graph as one batch, whose targets are the classes of the nodes of one part."""

    documents = False  # it is not text

    def __init__(self, graph: Graph, part: str):
        self.graph, self.numbers = graph, graph.parts[part]
        self.name = f"{graph.name}, {part}"
        dense = graph.features[None]
        self.features = dense.coalesce() if dense.is_sparse else dense

    def epoch(self, number: int) -> list[np.ndarray]:
        return [self.numbers]

    def make(self, numbers: np.ndarray) -> Batch:
        targets = torch.full_like(self.graph.labels, IGNORE)
        targets[numbers] = self.graph.labels[numbers]
        return Batch(self.features, targets[None], count=len(numbers), pattern=self.graph.pattern)

    @property
    def batch(self) -> Batch:
        return self.make(self.numbers)

    def digest(self) -> str:
        """Return a hash of the inputs and the targets."""
        features, digest = self.features, hashlib.sha256()
        seen = (features.indices(), features.values()) if features.is_sparse else (features,)
        edges = self.graph.pattern.edges(len(self.graph.labels))
        for tensor in (*seen, edges, self.graph.labels, torch.from_numpy(self.numbers)):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()
