"""Guessing from the command line: the same answers, by what was said before or by a smaller model."""

import json

import pytest

from regard.cli import main
from regard.decode import DecodeConfig
from regard.runs.job import Job
from regard.tasks.load import load
from regard.train.job import start

TEXT = "".join(
    f"{a} says {b} and {a} says {b} again\n\n" for a in ("ann", "bob", "cid") for b in ("yes", "no", "maybe")
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guess")
    (folder / "text.txt").write_text(TEXT * 3)
    for name, width in (("large", 32), ("small", 16)):
        sets = [f"model.width={width}", "model.heads=2", "model.depth=2", "train.steps=30", "train.lr=0.01"]
        sets += ["train.batch_tokens=256", "train.context_length=24", "train.warmup=3", "model.dropout=0"]
        start(
            Job("gpt2", str(folder / name), None, sets, str(folder / "text.txt"), tokenizer="words", as_published=True),
            print,
        ).train()
    return folder


def test_guesses_from_before_and_from_a_draft(runs, capsys):
    (runs / "ask.txt").write_text("ann says yes\nbob\n")
    told = []
    for more in (
        [],
        ["--speculate", "3"],
        ["--draft-model", str(runs / "small")],
        ["--speculate", "2", "--temperature", "1"],
    ):
        given = ["predict", str(runs / "large"), str(runs / "ask.txt"), "--max-new-tokens", "20", "--json", *more]
        assert main([*given, *(["--seed", "3"] if "--temperature" in more else [])]) == 0
        told.append([json.loads(line)[0]["text"] for line in capsys.readouterr().out.splitlines()])
    assert told[0] == told[1] == told[2]
    drawn = load(runs / "large").predict(
        ["ann says yes", "bob"], DecodeConfig(temperature=1.0, max_new_tokens=20, seed=3)
    )
    assert told[3] == [answers[0].text for answers in drawn]


def test_what_cannot_guess_is_refused(runs, capsys, tmp_path):
    (tmp_path / "ask.txt").write_text("ann\n")
    given = ["predict", str(runs / "large"), str(tmp_path / "ask.txt")]
    assert main([*given, "--draft-model", str(tmp_path)]) == 2
    assert "run" in capsys.readouterr().err
    assert main([*given, "--speculate", "3", "--beam", "2"]) == 2
    assert "decode.beam = 1" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten one two three\n" * 30)
    sets = [
        "model.width=16",
        "model.heads=2",
        "model.depth=1",
        "train.steps=2",
        "train.context_length=8",
        "train.batch_tokens=64",
    ]
    other = Job(
        "gpt2", str(tmp_path / "other"), None, sets, str(tmp_path / "text.txt"), tokenizer="words", as_published=True
    )
    start(other, print).train()
    assert main([*given, "--draft-model", str(tmp_path / "other")]) == 2
    assert "the very same tokens" in capsys.readouterr().err
