"""Classifying the nodes of a graph: reading, learning, resuming, evaluating, and bad files."""

import json

import numpy as np
import pytest
import torch

import regard
from regard import UserError
from regard.cli import main
from regard.data.graph import open_graph
from regard.runs.job import Job
from regard.train.job import resume, start

NODES, WORDS, CLASSES = 61, 17, 3
TINY = [
    "model.width=12",
    "model.heads=3",
    "model.dropout=0.1",
    "train.lr=0.02",
    "train.eval_steps=3",
    "train.patience=0",
]


def held(sparse=True):
    """Write a graph in which nodes of a class mostly share features and edges."""
    rng = np.random.default_rng(0)
    labels = rng.integers(CLASSES, size=NODES)
    same = labels[:, None] == labels[None]
    edges = np.argwhere(np.triu(rng.random((NODES, NODES)) < np.where(same, 0.2, 0.01), 1))
    words = rng.random((NODES, WORDS)) < np.where(np.arange(WORDS) % CLASSES == labels[:, None], 0.3, 0.1)
    row, col = words.nonzero()
    numbers = rng.permutation(NODES)
    made = {"labels": labels, "edges": edges.astype(np.int32)}
    made |= {"train_idx": numbers[:20], "val_idx": numbers[20:35], "test_idx": numbers[35:]}
    if not sparse:
        return made | {"features": words.astype(np.float32)}
    shape = np.array([NODES, WORDS])
    return made | {"feat_row": row, "feat_col": col, "feat_val": np.ones(len(row), np.float32), "feat_shape": shape}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "graph.npz", **held())
    return tmp_path / "data"


@pytest.fixture
def job(folder, tmp_path):
    def make(run="run", recipe="gat", **train):
        sets = [*TINY, *(f"train.{name}={value}" for name, value in ({"steps": 60} | train).items())]
        return Job(recipe, str(tmp_path / run), "tiny", sets, data=str(folder), as_published=True)

    return make


def test_reading(folder, tmp_path):
    graph = open_graph(folder)
    assert (graph.channels, graph.classes) == (WORDS, CLASSES)
    edges = held()["edges"]
    listed = graph.pattern.edges(NODES)[1:].T.tolist()
    assert sorted(map(tuple, listed)) == sorted([*map(tuple, edges.tolist()), *map(tuple, edges[:, ::-1].tolist())])
    np.savez(tmp_path / "dense.npz", **held(sparse=False))
    dense = open_graph(tmp_path / "dense.npz")
    assert torch.equal(dense.features, graph.features.to_dense())
    batch = graph.dev.batch
    assert batch.count == 15
    asked = (batch.targets[0] >= 0).nonzero().flatten()
    assert sorted(held()["val_idx"].tolist()) == asked.tolist()
    assert torch.equal(batch.targets[0, asked], graph.labels[asked])


@pytest.mark.parametrize("recipe", ["gat", "gatv2"])
def test_learns_and_is_measured(job, tmp_path, capsys, recipe):
    said = []
    prepared = start(job(recipe=recipe), say=said.append)
    assert "61 nodes" in said[0]
    prepared.train()
    run = regard.load(tmp_path / "run")
    graph = open_graph(tmp_path / "data")
    right = run.label(graph) == graph.labels
    assert float(right[graph.test.numbers].double().mean()) > 0.7
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scores"]["accuracy"] == pytest.approx(100 * float(right[graph.test.numbers].double().mean()))
    assert told["counts"] == {"nodes": 26}
    best = prepared.trainer.best
    assert best["metrics"]["loss"] == pytest.approx(run.evaluate(graph.dev, ["loss"])["scores"]["loss"], rel=1e-4)
    with pytest.raises(UserError, match=r"predicts the classes of a graph's nodes"):
        run.predict(["a text"])


def test_early_stop_and_going_on(job, tmp_path):
    """A resumed run ends like an uninterrupted one; with patience it stops early."""
    whole = start(job("whole", steps=12), say=lambda s: None)
    whole.train()
    start(job("cut", steps=6), say=lambda s: None).train()
    again = resume(tmp_path / "cut", {"steps": 12}, say=lambda s: None)
    again.train()
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    soon = start(job("soon", patience=1, lr=0.5, eval_steps=1), say=lambda s: None)
    soon.train()
    assert soon.trainer.step < 60
    changed = held() | {"labels": np.roll(held()["labels"], 1)}
    np.savez(tmp_path / "data" / "graph.npz", **changed)
    with pytest.raises(UserError, match="the data is not what it was"):
        resume(tmp_path / "cut", {"steps": 20}, say=lambda s: None)


def test_unlabelled_nodes_are_left_out_of_the_loss(folder, job, tmp_path):
    """Neighbors attend to a node of class -1, which is neither learned nor evaluated."""
    made = held()
    unknown = np.concatenate((made["train_idx"][:5], made["val_idx"][:4], made["test_idx"][:3]))
    labels = made["labels"].copy()
    labels[unknown] = -1
    np.savez(folder / "graph.npz", **made | {"labels": labels})
    graph = open_graph(folder)
    assert graph.classes == CLASSES
    assert [len(nodes.numbers) for nodes in (graph.train, graph.dev, graph.test)] == [15, 11, 23]
    assert "12 nodes have no class (-1)" in graph.notes[1]
    batch = graph.train.batch
    assert batch.count == 15
    assert int((batch.targets >= 0).sum()) == 15
    without = made | {name: np.setdiff1d(made[name], unknown) for name in ("train_idx", "val_idx", "test_idx")}
    found = []
    for name, kept in (("unlabelled", made | {"labels": labels}), ("without", without)):
        np.savez(folder / "graph.npz", **kept)
        prepared = start(job(name, steps=3), say=lambda s: None)
        prepared.train()
        found.append(prepared.trainer.metrics["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


BAD = {
    "a class of -2": ({"labels": np.full(61, -2)}, "labels reaches from -2 to -2, and should from -1"),
    "no class at all": ({"labels": np.full(61, -1)}, "no node for train has a class"),
    "no class in dev": (
        {"labels": np.where(np.isin(np.arange(61), held()["val_idx"]), -1, 1)},
        "no node for dev has a class",
    ),
    "no labels": ({"labels": None}, "holds no 'labels'"),
    "no training nodes": ({"train_idx": None}, "holds no 'train_idx'"),
    "an edge to nowhere": ({"edges": np.array([[0, 61]])}, "edges reaches from 0 to 61, and should from 0 to 60"),
    "edges with three ends": ({"edges": np.array([[0, 1, 2]])}, r"should be \(edges, 2\)"),
    "no edge": ({"edges": np.zeros((0, 2), int)}, "at least one"),
    "too few labels": ({"labels": np.array([0, 1])}, "61 nodes have features and 2 have labels"),
    "labels that are no numbers": ({"labels": np.array(["a"] * 61)}, "should be whole numbers"),
    "features beyond": ({"feat_col": np.full(200, 17)}, "should be of one length"),
    "a word beyond": ({"feat_col": np.full(len(held()["feat_col"]), 17)}, "feat_col reaches from 17 to 17"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_graphs(folder, what):
    changes, sentence = BAD[what]
    made = {key: value for key, value in (held() | changes).items() if value is not None}
    np.savez(folder / "graph.npz", **made)
    with pytest.raises(UserError, match=sentence):
        open_graph(folder)


def test_bad_files_and_jobs(folder, tmp_path, job):
    with pytest.raises(UserError, match="holds none"):
        open_graph(tmp_path)
    (folder / "other.npz").write_bytes(b"nothing")
    with pytest.raises(UserError, match="2 of them: give the file itself"):
        open_graph(folder)
    with pytest.raises(UserError, match="cannot be read"):
        open_graph(folder / "other.npz")
    (folder / "other.npz").unlink()
    asked = job()
    asked.tokenizer = "bpe"
    with pytest.raises(UserError, match="there is no tokenizer to give"):
        start(asked)
    np.savez(folder / "graph.npz", **{key: value for key, value in held().items() if key != "val_idx"})
    with pytest.raises(UserError, match="there is no dev set, and 'patience' needs one"):
        start(job(patience=3), say=lambda s: None)
