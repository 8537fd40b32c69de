"""Training on images: folders, arrays and tables, learning, resuming, and what is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.cli import main
from regard.core import UserError
from regard.data.pictures import ImageBatches, open_images, prepare_images
from regard.runs.job import Job
from regard.train.job import resume, start

SIDE = 8
SMALL = ["model.depth=1", "model.width=16", "model.heads=2", "model.dropout=0", "model.embed.image=8",
         "model.layer.0.feedforward.hidden=24", "train.lr=0.01", "train.warmup=1", "train.batch_size=16"]  # fmt: skip


def drawn(kind: str, rng) -> np.ndarray:
    """Write images with horizontal stripes, vertical stripes, or none."""
    bright = rng.integers(120, 255)
    pixels = rng.integers(0, 60, (SIDE, SIDE, 3))
    if kind == "across":
        pixels[::2] += bright - 60
    elif kind == "along":
        pixels[:, ::2] += bright - 60
    return pixels.astype(np.uint8)


KINDS = ("across", "along", "none")


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(1)
    for kind in KINDS:
        (tmp_path / "data" / kind).mkdir(parents=True)
        for number in range(30):
            Image.fromarray(drawn(kind, rng)).save(tmp_path / "data" / kind / f"{number}.png")
    return tmp_path / "data"


@pytest.fixture
def job(tmp_path, folder):
    def make(run="run", steps=40, recipe="vit", data=None, small=SMALL, **more):
        own = [f"train.steps={steps}", "train.eval_steps=20", *small]
        return Job(recipe, str(tmp_path / run), "tiny", own, str(data or folder), **more, as_published=True)

    return make


def quiet(sentence: str) -> None:
    pass


def test_it_learns_and_is_asked(job, folder, tmp_path, capsys):
    said = []
    prepared = start(job(), say=said.append)
    assert "pictures of 3 classes, 82 for train, 4 for dev, 4 for test" in said[0]
    prepared.train()
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["labels"] == list(KINDS)
    assert told["images"]["size"] == [SIDE, SIDE]
    run = regard.load(tmp_path / "run")
    files = [folder / kind / "7.png" for kind in KINDS]
    assert [best[0].text for best in run.predict(files)] == list(KINDS)
    scores = run.evaluate(run.examples({"data": str(folder)}, "train"), ["loss", "accuracy"])["scores"]
    assert scores["accuracy"] > 95
    assert prepared.trainer.best["metrics"]["accuracy"] > 70
    assert run.vectors(files).shape == (3, 16)
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), *map(str, files), "--num-return", "2", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["answers"][0]["text"] for line in lines] == list(KINDS)
    assert all(len(line["answers"]) == 2 for line in lines)
    assert main(["evaluate", str(tmp_path / "run"), "--json", "--part", "dev"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"pictures": 4}


def test_going_on_changes_nothing(job, folder, tmp_path):
    whole = start(job("whole", 6, dev="0", test="0"), say=quiet)  # else the best one on dev is kept
    whole.train()
    start(job("cut", 3, dev="0", test="0"), say=quiet).train()
    again = resume(tmp_path / "cut", {"steps": 6}, say=quiet)
    again.train()
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    Image.fromarray(drawn("along", np.random.default_rng(2))).save(folder / "across" / "3.png")
    with pytest.raises(UserError, match="the data is not what it was"):
        resume(tmp_path / "cut", {"steps": 9}, say=quiet)


def test_parts(folder, tmp_path):
    """Splits come from folder names, shares or other folders; the same seed gives the same splits."""
    one, two = open_images(folder, 0.2, 0), open_images(folder, 0.2, 0)
    assert one.dev.keys == two.dev.keys
    assert one.test is None
    assert len(one.train) + len(one.dev) == 90
    assert not set(one.train.keys) & set(one.dev.keys)
    assert open_images(folder, 0.2, 0, seed=2).dev.keys != one.dev.keys
    (tmp_path / "cut").mkdir()
    folder.rename(tmp_path / "cut" / "train")
    for kind in KINDS:
        (tmp_path / "cut" / "valid" / kind).mkdir(parents=True)
        (tmp_path / "cut" / "train" / kind / "7.png").rename(tmp_path / "cut" / "valid" / kind / "7.png")
    found = open_images(tmp_path / "cut")
    assert (len(found.train), len(found.dev), found.test) == (87, 3, None)
    other = open_images(tmp_path / "cut" / "train", tmp_path / "cut" / "valid")
    assert other.dev.answers == found.dev.answers


def test_arrays(job, tmp_path):
    rng = np.random.default_rng(3)
    labels = np.arange(60) % 3
    images = np.stack([drawn(KINDS[label], rng)[..., 0] for label in labels])
    np.savez(tmp_path / "a.npz", images=images, labels=labels + 9)
    assert open_images(tmp_path / "a.npz").labels == ["9", "10", "11"]
    np.savez(tmp_path / "b.npz", images=images, labels=labels, names=np.array(KINDS), test_images=images[:7],
             test_labels=labels[:7])  # fmt: skip
    found = open_images(tmp_path / "b.npz")
    assert len(found.test) == 7
    assert found.test.answers[:3] == list(KINDS)
    small = [*SMALL, "model.embed.channels=1"]
    prepared = start(job(data=tmp_path / "b.npz", steps=2, small=small), say=quiet)
    prepared.train()
    batch = ImageBatches(*prepared_rows(found, prepared, tmp_path), 4, 1, shuffle=False).make(np.arange(4))
    assert torch.allclose(batch.tokens[:, 0], torch.from_numpy(found.train.files[:4] / 127.5 - 1).float(), atol=1e-6)


def prepared_rows(found, prepared, tmp_path):
    lens = prepared.task.processor
    return prepare_images(found.train, [0] * len(found.train), lens, tmp_path / "rows")[0], lens


def test_epochs_see_everything_once():
    rows = np.zeros(11, dtype=[("answer", "<i8"), ("pixels", "u1", (1, 2, 2))])
    seen = ImageBatches(rows, None, 4, 7)
    for number in (0, 1):
        assert sorted(np.concatenate(seen.epoch(number)).tolist()) == list(range(11))
        assert [len(some) for some in seen.epoch(number)] == [4, 4, 3]
        assert np.concatenate(seen.epoch(number)).tolist() == np.concatenate(seen.epoch(number)).tolist()
    assert np.concatenate(seen.epoch(0)).tolist() != np.concatenate(seen.epoch(1)).tolist()


def test_a_broken_picture(job, folder, tmp_path):
    (folder / "along" / "3.png").write_bytes(b"not a picture")
    with pytest.raises(UserError, match=r"along/3.png is no picture"):
        start(job(steps=1), say=quiet)
    said = []
    start(job(steps=1, bad_lines="skip", dev="0", test="0"), say=said.append).train()
    rows = np.load(tmp_path / "run" / "data" / "train.images")
    assert np.bincount(rows["answer"]).tolist() == [30, 29, 30]
    assert rows["pixels"].reshape(89, -1).any(1).all()
    assert any("1 pictures cannot be read and are left out" in line for line in said)


def test_bad_data(job, folder, tmp_path):
    def refused(match, **given):
        with pytest.raises(UserError, match=match):
            start(job(**given), say=quiet)

    refused("there is no", data=tmp_path / "dta")
    refused("neither a folder of pictures", data=folder / "along" / "3.png")
    (tmp_path / "one" / "class").mkdir(parents=True)
    refused("holds no class", data=tmp_path / "one")
    refused("no tokenizer to give", tokenizer="bpe")
    np.savez(tmp_path / "a.npz", labels=np.zeros(3))
    refused("holds no 'images'", data=tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", images=np.zeros((3, 4, 4)))
    refused("should be bytes", data=tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", images=np.zeros((3, 4, 4), np.uint8), labels=np.zeros(2))
    refused(r"there are 3 images, and labels is of shape \(2,\)", data=tmp_path / "c.npz")
    (tmp_path / "d.npz").write_bytes(b"PK not")
    refused("cannot be read", data=tmp_path / "d.npz")
    (tmp_path / "dev" / "round").mkdir(parents=True)
    (tmp_path / "dev" / "across").mkdir()
    for kind in ("round", "across"):
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "dev" / kind / "a.png")
    refused("the class 'round' is not in the training data", dev=str(tmp_path / "dev"))


TOWERS = ["model.image.depth=1", "model.image.width=16", "model.image.heads=2", "model.image.embed.image=8",
          "model.image.layer.0.feedforward.hidden=24", "model.text.depth=1", "model.text.width=16",
          "model.text.heads=2", "model.text.layer.0.feedforward.hidden=24", "train.lr=0.01", "train.warmup=1",
          "train.batch_size=9"]  # fmt: skip
SAID = {"across": "stripes that lie", "along": "stripes that stand", "none": "nothing at all"}


@pytest.fixture
def table(folder):
    lines = [f"{kind}/{number}.png\t{SAID[kind]}" for number in range(30) for kind in KINDS]
    (folder / "seen.tsv").write_text("\n".join(lines) + "\n")
    return folder / "seen.tsv"


def test_towers_learn(job, folder, table, tmp_path, capsys):
    given = job("towers", 60, "clip", table, TOWERS, tokenizer="words", dev="0.2", test="0")
    start(given, say=quiet).train()
    run = regard.load(tmp_path / "towers")
    assert run.model.end == run.source.end
    files = [folder / kind / "7.png" for kind in KINDS]
    likely = run.match(files, list(SAID.values()))
    assert likely.argmax(1).tolist() == [0, 1, 2]
    assert torch.allclose(likely.sum(1), torch.ones(3), atol=1e-5)
    scores = run.evaluate(run.examples({"data": str(table)}, "train"), ["loss", "accuracy"])["scores"]
    assert scores["loss"] < 4.2  # among 64 with three texts: log(64 / 3) at the best, log(64) by chance
    capsys.readouterr()
    texts = [word for text in SAID.values() for word in ("--text", text)]
    assert main(["predict", str(tmp_path / "towers"), *map(str, files), *texts, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["answers"][0]["text"] for line in lines] == list(SAID.values())
    assert all(len(line["answers"]) == 3 for line in lines)
    assert main(["predict", str(tmp_path / "towers"), str(files[0])]) == 2
    assert "--text" in capsys.readouterr().err
    long = ["predict", str(tmp_path / "towers"), str(files[0]), "--text", "red " * 500]
    assert main(long) == 2
    assert "can be taken: shorten it, or let it be cut (--truncate)" in capsys.readouterr().err
    assert main([*long, "--truncate"]) == 0


def test_towers_go_on(job, table, tmp_path):
    alone = {"tokenizer": "words", "dev": "0", "test": "0"}  # else the best one on dev is kept
    whole = start(job("whole", 4, "clip", table, TOWERS, **alone), say=quiet)
    whole.train()
    start(job("cut", 2, "clip", table, TOWERS, **alone), say=quiet).train()
    again = resume(tmp_path / "cut", {"steps": 4}, say=quiet)
    again.train()
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    table.write_text(table.read_text().replace("nothing at all", "at all nothing"))
    with pytest.raises(UserError, match="the data is not what it was"):
        resume(tmp_path / "cut", {"steps": 9}, say=quiet)


def test_bad_tables(job, folder, table, tmp_path):
    def refused(match, data):
        with pytest.raises(UserError, match=match):
            start(job("t", 1, "clip", data, TOWERS, tokenizer="words"), say=quiet)

    refused("holds no train.tsv", tmp_path)
    table.write_text("across/1.png a text\n")
    refused("seen.tsv, line 1: a file, a tab", table)
    table.write_text("across/99.png\ta text\nacross/98.png\tb\nacross/97.png\tc\n")
    refused("there is no picture", table)
    table.write_text("")
    refused("names no picture", table)
