"""Embedding texts: pooling, order, normalization, similarity, files, and models that cannot."""

import json

import numpy as np
import pytest
import torch

import regard
from regard.cli import main
from regard.core import Context, UserError
from regard.data import Tokenizer
from regard.data.masks import with_special_tokens
from regard.decode import DecodeConfig
from regard.tasks import reader
from regard.tasks.classify import TextClassifier
from regard.tasks.embed import Embedder
from regard.tasks.fill import Filler
from regard.tasks.run import Run

TEXTS = ["the cat sat on the mat", "a dog", "on the mat sat a dog and a cat", "cat", "", "a dog and the cat"]
SMALL = ["model.width=12", "model.heads=3", "model.depth=2"]
LAYER = "model.layer.0.feedforward.hidden=20"


@pytest.fixture(scope="module")
def words():
    return with_special_tokens(Tokenizer.train("words", TEXTS))


def build(recipe, tokenizer, *more):
    torch.manual_seed(1)
    return regard.build(recipe, "tiny", tokenizer.size, [*SMALL, *more]).double()


@pytest.fixture(scope="module")
def minilm(words):
    return Embedder(build("minilm", words, LAYER), words, words)


def plain(run, text, how):
    """Return the vector of one text, computed alone."""
    row = torch.tensor([run.source.encode_with_special_tokens([text])[0]])
    context = Context.begin(*row.shape)
    with torch.no_grad():
        x = run.model.hidden(row, context) if run.model.kind == "encoder" else run.model.encode(row).x
    return {"mean": x.mean(1), "first": x[:, 0], "max": x.amax(1), "last": x[:, -1]}[how][0]


@pytest.mark.parametrize("how", ["mean", "first", "max", "last"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_vector_for_each_text_in_order(minilm, how, normalize, monkeypatch):
    monkeypatch.setattr(reader, "BUDGET", 20)  # several batches, padded ones among them
    found = minilm.embed(TEXTS, how, normalize)
    wanted = torch.stack([plain(minilm, text, how) for text in TEXTS])
    torch.testing.assert_close(found, wanted / wanted.norm(dim=-1, keepdim=True) if normalize else wanted)
    assert found.shape == (6, 12)


def test_as_the_head_says(minilm, words):
    row = torch.tensor([words.encode_with_special_tokens([TEXTS[0]])[0]])
    with torch.no_grad():
        torch.testing.assert_close(minilm.embed(TEXTS[:1]), minilm.model(row))
    assert minilm.embed(TEXTS).norm(dim=-1).tolist() == pytest.approx([1.0] * 6)
    assert minilm.embed(TEXTS, normalize=False).norm(dim=-1).tolist() != pytest.approx([1.0] * 6)
    other = Embedder(build("minilm", words, LAYER, "model.head.pool=first", "model.head.normalize=false"), words, words)
    torch.testing.assert_close(other.embed(TEXTS[:1])[0], plain(other, TEXTS[0], "first"))


def test_any_encoder_has_vectors(words):
    filler = Filler(
        build("bert", words, LAYER, "model.head.tokens.hidden=12", "model.head.pair.hidden=12"), words, words
    )
    labeller = TextClassifier(build("transformer-encoder", words, "model.head.classes=3", LAYER), words, words)
    hidden = [f"model.{side}.layer.0.feedforward.hidden=20" for side in ("encoder", "decoder")]
    translator = Run(build("transformer", words, *hidden), words, words)
    for run in (filler, labeller, translator):
        torch.testing.assert_close(run.embed(TEXTS), torch.stack([plain(run, text, "mean") for text in TEXTS]))
    assert run.embed([]).shape == (0, 12)


def test_a_decoder_has_none(words):
    writer = Run(build("transformer-decoder", words, LAYER), words, words)
    with pytest.raises(UserError, match="come of an encoder that reads texts"):
        writer.embed(TEXTS)


def test_likeness(minilm):
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[2]), (TEXTS[3], TEXTS[5])]
    ones, others = (minilm.embed(list(side), normalize=False) for side in zip(*pairs, strict=True))
    wanted = torch.nn.functional.cosine_similarity(ones, others)
    torch.testing.assert_close(minilm.cosines(pairs), wanted)
    assert minilm.cosines(pairs)[1].item() == pytest.approx(1.0)


def test_what_cannot_be(minilm, words):
    with pytest.raises(UserError, match="unknown pool 'middle'"):
        minilm.embed(TEXTS, "middle")
    with pytest.raises(UserError, match="for a single one, say"):
        minilm.embed("cat")
    short = Embedder(
        build("minilm", words, LAYER, "model.embed.position.length=5", "decode.truncate=false"), words, words
    )
    with pytest.raises(UserError, match=r"line 1 has 8 tokens, and at most 5"):
        short.embed(TEXTS)
    short.config = DecodeConfig(truncate=True)
    torch.testing.assert_close(short.embed(TEXTS[:1]), short.embed(["the cat sat"]))


# From the command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory, words):
    """Return a run folder as conversion writes it."""
    path = tmp_path_factory.mktemp("runs") / "minilm"
    model = build("minilm", words, LAYER).float()
    regard.save(model, path)
    words.save(path / "tokenizer.json")
    (path / "run.json").write_text(json.dumps({"tokenizers": [words.hash(), words.hash()]}))
    return path


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def test_vectors_as_lines(folder, file, capsys):
    run = regard.load(folder)
    assert isinstance(run, Embedder)
    assert main(["predict", str(folder), str(file)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(lines, run.embed(TEXTS), rtol=1e-6, atol=1e-7)
    assert main(["predict", str(folder), str(file), "--embed", "--pool", "first", "--no-normalize"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(lines, run.embed(TEXTS, "first", False), rtol=1e-6, atol=1e-7)
    assert main(["predict", str(folder), str(file), "--json"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert set(line[0]) == {"vector", "cut"}, "once, not as a text, too"


def test_vectors_in_a_file(folder, file, tmp_path, capsys):
    out = tmp_path / "vectors.npy"
    assert main(["predict", str(folder), str(file), "--out", str(out)]) == 0
    found = np.load(out)
    assert found.dtype == np.float32
    assert np.array_equal(found, regard.load(folder).embed(TEXTS).numpy())
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []
    assert main(["predict", str(folder), str(file), "--out", str(tmp_path / "vectors.csv")]) == 2
    assert "vectors.npy" in capsys.readouterr().err
    assert main(["predict", str(folder), str(file), "--out", str(tmp_path / "no" / "vectors.npy")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_likeness_of_lines(folder, tmp_path, capsys):
    path = tmp_path / "pairs.tsv"
    path.write_text("the cat\ta dog\ncat\tcat\n")
    assert main(["predict", str(folder), str(path), "--similarity"]) == 0
    lines = [float(line) for line in capsys.readouterr().out.splitlines()]
    wanted = regard.load(folder).cosines([("the cat", "a dog"), ("cat", "cat")])
    assert lines == pytest.approx(wanted.tolist(), abs=1e-4)
    assert main(["predict", str(folder), str(path), "--similarity", "--json"]) == 0
    told = [json.loads(line)[0]["cosine"] for line in capsys.readouterr().out.splitlines()]
    assert told == pytest.approx(wanted.tolist(), abs=1e-6)
    path.write_text("the cat\ta dog\ncat\n")
    assert main(["predict", str(folder), str(path), "--similarity"]) == 2
    assert "line 2 has 1 texts" in capsys.readouterr().err


def test_options_that_mean_nothing_here(folder, file, capsys):
    assert main(["predict", str(folder), str(file), "--beam", "3"]) == 2
    told = capsys.readouterr().err
    assert "this model has nothing to do with --beam; its options: --truncate, --pool" in told
