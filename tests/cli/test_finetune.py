"""Fine-tuning through the command line: begin from a run, with a new head or small maps, and put it to use."""

import json

import pytest
from safetensors.torch import load_file

from regard.cli import main

SMALL = [
    "model.width=12",
    "model.heads=2",
    "model.depth=2",
    "model.layer.0.feedforward.hidden=16",
    "train.batch_tokens=256",
]
WORDS = ("an", "apple", "bee", "cat", "dog", "egg", "fig", "goat", "hen", "ice")


def said(capsys):
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data for every task, and a run to begin from."""
    made = tmp_path_factory.mktemp("finetune")
    pairs = [(one, two) for one in WORDS for two in WORDS]
    texts = [f"{one} {two}" for one, two in pairs]
    (made / "labels.tsv").write_text("".join(f"{text}\t{text[0] in 'ae'}\n" for text in texts))
    (made / "pairs.tsv").write_text("".join(f"{one}\t{two}\t{len(one) / 2 - len(two)}\n" for one, two in pairs))
    tags = {word: "B-V" if word[0] in "aei" else "O" for word in WORDS}
    (made / "tags.conll").write_text("\n".join(f"{a}\t{tags[a]}\n{b}\t{tags[b]}\n" for a, b in pairs))
    sets = [word for one in SMALL for word in ("--set", one)]
    given = ["--data", str(made / "labels.tsv"), "--tokenizer", "words", "--dev", "10", "--test", "10", "--steps", "3"]
    assert main(["train", "transformer-encoder", "--size", "tiny", *given, *sets, "--out", str(made / "base")]) == 0
    return made


def train(place, data, *more):
    return main(["train", "--from", str(place / "base"), "--data", str(place / data), "--dev", "10", "--test", "10",
                 "--steps", "3", *more])  # fmt: skip


def test_classify_with_small_maps(place, tmp_path, capsys):
    """Its folder is called by what it begins from; it is merged, and answers the same."""
    run, plain = tmp_path / "fine", tmp_path / "plain"
    assert (
        train(place, "labels.tsv", "--task", "classify", "--lora", "2", "--metric", "f1", "--out", str(run), "--json")
        == 0
    )
    assert set(said(capsys)["metrics"]) == {"loss", "f1", "accuracy"}
    assert main(["merge", str(run), str(plain), "--json"]) == 0
    assert said(capsys)["out"] == str(plain)
    texts = tmp_path / "texts.txt"
    texts.write_text("an egg\ndog\n")
    told = []
    for folder in (run, plain):
        assert main(["predict", str(folder), str(texts), "--json", "--num-return", "2"]) == 0
        told.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
        assert main(["evaluate", str(folder), "--part", "dev", "--metric", "accuracy", "--json"]) == 0
        assert set(said(capsys)["scores"]) == {"accuracy"}
    for one, two in zip(*told, strict=True):
        assert [answer["text"] for answer in one] == [answer["text"] for answer in two]
        assert one[0]["score"] == pytest.approx(two[0]["score"], abs=1e-4)
    assert main(["train", "--resume", str(run), "--steps", "4", "--json"]) == 0
    assert said(capsys)["step"] == 4


def test_where_it_goes(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train(place, "labels.tsv", "--task", "classify", "--freeze", "body", "--json") == 0
    assert said(capsys)["run"] == "runs/base-classify-1"
    assert train(place, "labels.tsv", "--freeze", "1", "--json") == 0
    assert said(capsys)["run"] == "runs/base-1"


def test_match(place, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(place, "pairs.tsv", "--task", "match", "--metric", "spearman", "--out", str(run), "--json") == 0
    assert set(said(capsys)["metrics"]) == {"loss", "spearman"}
    asked = tmp_path / "asked.tsv"
    asked.write_text("an egg\tdog\nbee\tgoat hen\n")
    assert main(["predict", str(run), str(asked)]) == 0
    assert len([float(line) for line in capsys.readouterr().out.split()]) == 2
    assert main(["evaluate", str(run), "--json"]) == 0
    assert set(said(capsys)["scores"]) == {"loss", "pearson", "spearman"}
    asked.write_text("an egg\n")
    assert main(["predict", str(run), str(asked)]) == 2
    assert "line 1 should be two texts with a tab between, and has 1" in capsys.readouterr().err


def test_tag(place, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(place, "tags.conll", "--task", "tag", "--metric", "span_f1", "--out", str(run), "--json") == 0
    assert set(said(capsys)["metrics"]) == {"loss", "span_f1", "tag_accuracy"}
    asked = tmp_path / "asked.txt"
    asked.write_text("an egg dog\nhen\n")
    assert main(["predict", str(run), str(asked)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [[word.partition("/")[0] for word in line.split()] for line in lines] == [["an", "egg", "dog"], ["hen"]]
    assert {word.partition("/")[2] for line in lines for word in line.split()} <= {"B-V", "O"}
    assert main(["predict", str(run), str(asked), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out.splitlines()[0])
    assert answer["text"] == lines[0]
    assert len(answer["tokens"]) == 3
    assert main(["evaluate", str(run), "--data", str(place / "tags.conll"), "--json"]) == 0
    assert set(said(capsys)["scores"]) == {"loss", "tag_accuracy", "span_f1"}


def test_others_weights_come_in_learn_and_go_back(place, tmp_path, capsys):
    """With small maps that are merged before; what goes out is what came in, but for what has learned."""
    text = tmp_path / "text.txt"
    text.write_text("an apple a bee and a cat\n" * 30)
    sets = [word for one in (*SMALL[:3], "train.context_length=12") for word in ("--set", one)]
    given = ["--data", str(text), "--tokenizer", "characters", "--dev", "0.1", "--test", "0", "--steps", "2"]
    folders = {name: str(tmp_path / name) for name in ("here", "theirs", "in", "fine", "plain", "back")}
    assert main(["train", "gpt2", "--size", "tiny", *given, *sets, "--out", folders["here"]]) == 0
    assert main(["convert", folders["here"], folders["theirs"]]) == 0
    assert main(["convert", folders["theirs"], folders["in"]]) == 0
    (tmp_path / "in" / "origin").mkdir(exist_ok=True)
    (tmp_path / "in" / "origin" / "note.txt").write_text("by somebody")
    given = ["--data", str(text), "--dev", "0.1", "--test", "0", "--steps", "2", "--set", "train.lr=0.05"]
    assert main(["train", "--from", folders["in"], "--lora", "2", *given, "--out", folders["fine"]]) == 0
    assert main(["convert", folders["fine"], folders["back"]]) == 2
    assert "merge LoRA first" in capsys.readouterr().err
    assert main(["merge", folders["fine"], folders["plain"]]) == 0
    assert main(["convert", folders["plain"], folders["back"]]) == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert one.keys() == two.keys()
    changed = {name for name in one if not one[name].equal(two[name])}
    assert changed == {f"transformer.h.{i}.attn.c_attn.weight" for i in range(2)}
    assert (tmp_path / "back" / "note.txt").read_text() == "by somebody"
    assert main(["predict", folders["plain"], str(text), "--max-new-tokens", "2"]) == 0


WRONG = [
    (["train", "--from", "nowhere", "--data", "DATA", "--steps", "1"], "there is no run folder 'nowhere'"),
    (["train", "--from", "BASE", "--task", "tagg", "--data", "DATA", "--steps", "1"], "did you mean 'tag'"),
    (["train", "--from", "BASE", "--data", "DATA", "--as-published"], "a run needs an end"),
    (["train", "--from", "BASE", "--data", "DATA", "--lora", "0", "--steps", "1"], "at least 1, not 0"),
    (["train", "transformer-encoder", "--lora", "3", "--data", "DATA", "--steps", "1"], "name one with --from"),
    (["train", "transformer", "--task", "tag", "--data", "DATA", "--steps", "1"], "is an encoder-decoder"),
    (["train", "gpt2", "--from", "BASE", "--data", "DATA", "--steps", "1"], "another model than 'gpt2' describes"),
    (["train", "--from", "BASE", "--data", "DATA", "--freeze", "9", "--steps", "1"], "this model has 2 layers"),
    (["train", "--resume", "BASE", "--lora", "3"], "--resume goes on with a run as it is: leave out --lora"),
    (["train", "--resume", "BASE", "--metric", "f1"], "leave out --metric"),
    (["train", "--resume", "BASE", "--set", "train.lr=3"], "leave out --set"),
    (["train", "--resume", "BASE", "--seed", "0"], "leave out --seed"),
    (["train", "--resume", "BASE", "--task", "tag"], "--resume goes on with a run as it is"),
    (["merge", "BASE", "OUT"], "nothing to merge"),
    (["merge", "nowhere", "OUT"], "holds no recipe.toml"),
]


@pytest.mark.parametrize(("given", "sentence"), WRONG, ids=[" ".join(given[:5]) for given, _ in WRONG])
def test_wrong(place, tmp_path, capsys, monkeypatch, given, sentence):
    monkeypatch.chdir(tmp_path)
    names = {"BASE": str(place / "base"), "DATA": str(place / "labels.tsv"), "OUT": str(tmp_path / "out")}
    assert main([names.get(word, word) for word in given]) == 2
    assert sentence in capsys.readouterr().err
