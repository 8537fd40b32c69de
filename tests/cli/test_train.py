"""The main job through the command line: train, predict, evaluate, resume, and what goes wrong, in a few seconds."""

import json
import tomllib

import pytest
import torch

from regard.cli import main

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A tiny language: words, and the same words the other way round."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    rows = []
    for _ in range(300):
        said = [WORDS[i] for i in torch.randint(len(WORDS), (int(torch.randint(1, 6, ())),)).tolist()]
        rows.append(f"{' '.join(said)}\t{' '.join(reversed(said))}")
    path.write_text("source\ttarget\n" + "\n".join(dict.fromkeys(rows)) + "\n")
    return path


SMALL = [
    "--set",
    "model.width=16",
    "--set",
    "model.heads=2",
    "--set",
    "model.depth=1",
    "--set",
    "train.batch_tokens=256",
]


def train(pairs, out, *more):
    given = ["train", "transformer", "--size", "tiny", "--data", str(pairs), "--tokenizer", "words", "--out", str(out)]
    return main([*given, *SMALL, *more])


def test_train_predict_evaluate_resume(pairs, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    assert train(pairs, out, "--steps", "6", "--metric", "exact", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 6
    assert set(told["metrics"]) >= {"loss", "exact"}
    for name in ("recipe.toml", "run.json", "tokenizer.json", "metrics.jsonl", "model.safetensors"):
        assert (out / name).is_file(), name

    asked = tmp_path / "asked.txt"
    asked.write_text("one two\n\nthree\n")
    assert main(["predict", str(out), str(asked), "--json", "--num-return", "2", "--beam", "3", "--attention"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(answers) for answers in lines] == [2, 2, 2]
    weights = lines[0][0]["alignment"]["weights"]
    assert all(abs(sum(row) - 1) < 1e-3 for row in weights)
    assert main(["predict", str(out), str(asked), "--stream", "--beam", "1"]) == 0
    streamed = capsys.readouterr().out
    assert main(["predict", str(out), str(asked), "--beam", "1"]) == 0
    assert capsys.readouterr().out == streamed

    assert (
        main(["evaluate", str(out), "--data", str(pairs), "--json", "--metric", "bleu", "--metric", "perplexity"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert set(told["scores"]) == {"bleu", "perplexity"}
    assert (told["data"], told["part"]) == (str(pairs), "all")
    assert "version:" in told["signatures"]["bleu"]
    assert main(["evaluate", str(out), "--part", "dev"]) == 0
    title, *table = capsys.readouterr().out.splitlines()
    assert title.strip() == f"the dev part of {pairs}"
    assert "perplexity" in "".join(table)
    assert main(["evaluate", str(out), "--part", "dev", "--json", "--metric", "loss"]) == 0
    assert json.loads(capsys.readouterr().out)["part"] == "dev"
    assert main(["evaluate", str(out), "--data", str(pairs), "--metric", "loss"]) == 0
    assert capsys.readouterr().out.splitlines()[0].strip() == f"all of {pairs}"
    assert main(["predict", str(out), str(asked), "--seed", "1"]) == 2
    told_seed = capsys.readouterr().err
    assert "--seed is for answers that are drawn at random: say --temperature as well" in told_seed

    assert main(["train", "--resume", str(out), "--steps", "9", "--threads", "1", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 9


def test_an_end_that_is_past_is_refused(pairs, tmp_path, capsys):
    """Steps, minutes and epochs count from the beginning of the run, which is said with what it has had."""
    out = tmp_path / "run"
    assert train(pairs, out, "--steps", "6") == 0
    before = (out / "recipe.toml").read_bytes()
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--steps", "4"]) == 2
    told = capsys.readouterr().err.strip()
    assert "steps count from the beginning of a run" in told
    assert "has had 6 of them: to go on, give a later end, such as --steps 10" in told
    assert "\n" not in told
    assert main(["train", "--resume", str(out), "--minutes", "1e-9"]) == 2
    assert "minutes count from the beginning of a run" in capsys.readouterr().err
    assert (out / "recipe.toml").read_bytes() == before
    (out / "model.safetensors").unlink()  # as if it had been stopped, so that it may end where it is
    assert main(["train", "--resume", str(out), "--steps", "4"]) == 0
    assert "has had 6 of them, so it ends here" in " ".join(capsys.readouterr().out.split())
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize("bound", ["minutes", "steps", "epochs"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_an_end_must_be_above_0(bound, value, pairs, capsys):
    """Before anything else is said."""
    assert main(["train", "--data", str(pairs), f"--{bound}", value]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == f"regard: --{bound} must be above 0, not {value}\n"


WRONG = [
    (["train"], "what to learn from"),
    (["train", "transformr", "--data", "PAIRS", "--steps", "1"], "did you mean 'transformer'"),
    (["train", "transformer", "--data", "nowhere.tsv", "--steps", "1"], "nowhere.tsv"),
    (["train", "transformer", "--data", "PAIRS", "--as-published"], "a run needs an end"),
    (["train", "transformer", "--data", "PAIRS", "--steps", "1", "--tokenizer", "bppe"], "did you mean 'bpe'"),
    (["train", "transformer", "--data", "PAIRS", "--steps", "1", "--metric", "blue"], "did you mean 'bleu'"),
    (["train", "transformer", "--data", "PAIRS", "--steps", "1", "--set", "train.lrr=3"], "train"),
    (["train", "transformer", "--data", "PAIRS", "--steps", "1", "--columns", "source,tarjet"], "tarjet"),
    (["train", "--resume", "nothing-here"], "nothing-here"),
    (["predict", "nothing-here"], "nothing-here"),
    (["evaluate", "nothing-here"], "nothing-here"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda value: " ".join(value)[-40:] if value else "")
def test_mistakes(arguments, words, pairs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([str(pairs) if word == "PAIRS" else word for word in arguments]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told
    assert len(told.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("run.json")), "nothing half-made is left"


def test_a_run_is_not_overwritten(pairs, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(pairs, out, "--steps", "1") == 0
    before = (out / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert train(pairs, out, "--steps", "1") == 2
    assert "--resume" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == before


def test_a_language_model_is_measured_on_the_last_part_of_its_text(tmp_path, capsys):
    """The last twentieth of the text is kept for `regard evaluate`, which tells bits per character."""
    text = "".join(f"line {number} of a text that goes on\n" for number in range(400))
    (tmp_path / "text.txt").write_text(text)
    out = tmp_path / "run"
    small = [word for one in ("width=8", "heads=2", "depth=1") for word in ("--set", f"model.{one}")]
    given = [
        "--data",
        str(tmp_path / "text.txt"),
        "--steps",
        "2",
        "--set",
        "train.context_length=16",
        "--out",
        str(out),
    ]
    assert main(["train", "transformer-decoder", "--size", "tiny", *small, *given, "--json"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["counts"]["characters"] == pytest.approx(len(text) / 20, abs=60)
    assert set(told["scores"]) == {"loss", "perplexity", "bits_per_character", "bits_per_byte"}
    assert main(["evaluate", str(out), "--part", "dev"]) == 0
    assert "bits_per_character" in capsys.readouterr().out


def test_bits_per_character_are_left_out_where_words_are_unknown(tmp_path, capsys):
    text = "".join(f"word{number} and word{7 * number}\n" for number in range(200))
    (tmp_path / "text.txt").write_text(text)
    out = tmp_path / "run"
    small = [word for one in ("width=8", "heads=2", "depth=1") for word in ("--set", f"model.{one}")]
    given = [
        "--data",
        str(tmp_path / "text.txt"),
        "--steps",
        "2",
        "--set",
        "train.context_length=16",
        "--out",
        str(out),
    ]
    words = ["--tokenizer", "words", "--vocab", "10"]
    assert main(["train", "transformer-decoder", "--size", "tiny", *small, *given, *words, "--json"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(out)]) == 0
    told = capsys.readouterr()
    assert "loss" in told.out
    assert "bits_per" not in told.out.partition("\n")[2]  # the first line names the file
    assert "regard: bits_per_character and bits_per_byte are left out, as the tokenizer" in told.err
    assert main(["evaluate", str(out), "--metric", "bits_per_byte"]) == 2
    assert "the metric 'bits_per_byte' means nothing here" in capsys.readouterr().err


FLAGS = {
    "--lr": ("0.02", "lr", 0.02),
    "--batch-tokens": ("512", "batch_tokens", 512),
    "--batch-size": ("7", "batch_size", 7),
    "--optimizer": ("muon", "optimizer", "muon"),
    "--warmup": ("3", "warmup", 3),
    "--label-smoothing": ("0.2", "label_smoothing", 0.2),
    "--schedule": ("linear", "schedule", "linear"),
    "--weight-decay": ("0.03", "weight_decay", 0.03),
    "--eval-steps": ("2", "eval_steps", 2),
    "--patience": ("9", "patience", 9),
}


def test_optimization_has_flags(pairs, tmp_path, capsys, monkeypatch):
    """Each sets the key of its name; what --set says is said last."""
    from regard.train.job import Prepared

    monkeypatch.setattr(Prepared, "train", lambda self, report: (_ for _ in ()).throw(KeyboardInterrupt))
    out = tmp_path / "run"
    given = [word for flag, (value, _, _) in FLAGS.items() for word in (flag, value)]
    start = ["train", "transformer", "--size", "tiny", "--data", str(pairs), "--steps", "4", "--out"]
    assert main([*start, str(out), *given, "--dropout", "0.3"]) == 130
    recipe = tomllib.loads((out / "recipe.toml").read_text())
    assert {key: recipe["train"][key] for _, key, _ in FLAGS.values()} == {key: v for _, key, v in FLAGS.values()}
    assert recipe["model"]["dropout"] == 0.3
    assert main([*start, str(tmp_path / "two"), "--lr", "0.5", "--set", "train.lr=0.25"]) == 130
    assert tomllib.loads((tmp_path / "two" / "recipe.toml").read_text())["train"]["lr"] == 0.25
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--lr", "3"]) == 2
    assert "leave out --lr" in capsys.readouterr().err


def test_flags_of_optimization_are_in_the_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["train", "--help"]) == 0
    told = capsys.readouterr().out
    panel = told[told.index("Optimization") :]
    for flag in (*FLAGS, "--dropout"):
        assert flag in panel
