"""`regard predict` and `regard evaluate`: what is read, what is written, options, streams, files, and refusals."""

import io
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import regard
from regard.cli import main
from regard.data import Tokenizer
from regard.data.masks import with_special_tokens
from regard.decode import DecodeConfig
from regard.machine import Fork

TEXTS = ["the cat sat on the mat", "a dog", "on the mat sat a dog and a cat", "cat"]
SMALL = ["model.width=12", "model.heads=3", "model.depth=1", "model.layer.0.feedforward.hidden=20"]


def write(folder, recipe, tokenizer, *more, **told):
    torch.manual_seed(5)
    regard.save(regard.build(recipe, "tiny", tokenizer.size, [*SMALL, *more]), folder)
    tokenizer.save(folder / "tokenizer.json")
    (folder / "run.json").write_text(json.dumps({"tokenizers": [tokenizer.hash()] * 2, **told}))
    return str(folder)


@pytest.fixture(scope="module")
def words():
    return with_special_tokens(Tokenizer.train("words", TEXTS))


@pytest.fixture(scope="module")
def writer(tmp_path_factory, words):
    return write(tmp_path_factory.mktemp("runs") / "writer", "transformer-decoder", words)


@pytest.fixture(scope="module")
def filler(tmp_path_factory, words):
    return write(tmp_path_factory.mktemp("runs") / "filler", "roberta", words, "model.head.hidden=12")


def lines(capsys):
    return capsys.readouterr().out.splitlines()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def asked(monkeypatch, text):
    """On standard input, from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


# Texts


def test_lines_of_several_files_and_of_standard_input(writer, tmp_path, capsys, monkeypatch):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("the cat\na dog\n")
    two.write_text("cat\r\n")
    assert main(["predict", writer, str(one), str(two), "--max-new-tokens", "3"]) == 0
    found = lines(capsys)
    run = regard.load(writer)
    assert found == [
        a[0].text
        for a in run.predict(["the cat", "a dog", "cat"], DecodeConfig.read({"max_new_tokens": 3}, run.config))
    ]
    asked(monkeypatch, "the cat\na dog\ncat\n")
    assert main(["predict", writer, "--max-new-tokens", "3"]) == 0
    assert lines(capsys) == found
    asked(monkeypatch, "a dog\n")
    assert main(["predict", writer, str(one), "-", "--max-new-tokens", "3"]) == 0
    assert lines(capsys) == [*found[:2], found[1]]


@pytest.mark.parametrize("many", [1, 3])
def test_as_many_threads_as_asked_for(writer, tmp_path, capsys, monkeypatch, many):
    """With three, three processes answer; the answers are the same."""
    path = tmp_path / "texts"
    path.write_text("\n".join(TEXTS * 20))
    given = ["predict", writer, str(path), "--max-new-tokens", "5"]
    before = torch.get_num_threads()
    assert main(given) == 0
    usual = lines(capsys)
    used = []
    monkeypatch.setattr("regard.tasks.run.ROWS_PER_WORKER", 2)
    monkeypatch.setattr("regard.machine.Fork.send", _counted(used))
    try:
        assert main([*given, "--threads", str(many)]) == 0
    finally:
        torch.set_num_threads(before)
    assert lines(capsys) == usual
    assert len({id(fork) for fork in used}) == (many if many > 1 else 0)
    assert main([*given, "--threads", "-1"]) == 2


def _counted(used):
    tell = Fork.send
    return lambda fork, *what: used.append(fork) or tell(fork, *what)


def test_bad_files(writer, tmp_path, capsys):
    there = tmp_path / "there.txt"
    there.write_text("cat\n")
    assert main(["predict", writer, str(there), str(tmp_path / "no.txt")]) == 2
    told = capsys.readouterr()
    assert "there is no file" in told.err
    assert not told.out, "nothing is answered before"
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"cat\n\xff\n")
    assert main(["predict", writer, str(bad)]) == 2
    assert "bad.txt, line 2 is not UTF-8" in capsys.readouterr().err


def test_masks_are_filled(filler, tmp_path, capsys):
    path = tmp_path / "masks.txt"
    path.write_text("the [MASK] sat\n<mask> dog and [MASK]\n")
    assert main(["predict", filler, str(path), "--num-return", "3"]) == 0
    found = lines(capsys)
    run = regard.load(filler)
    answers = run.predict(["the [MASK] sat", "[MASK] dog and [MASK]"], DecodeConfig(beam=3, num_return=3))
    assert found == [one.text for three in answers for one in three]
    assert main(["predict", filler, str(path), "--num-return", "3", "--json"]) == 0
    told = [json.loads(line) for line in lines(capsys)]
    assert [len(three) for three in told] == [3, 3]
    assert told[1][0]["tokens"] == answers[1][0].tokens
    assert told[1][0]["probabilities"] == pytest.approx(answers[1][0].probabilities)
    path.write_text("the cat\n")
    assert main(["predict", filler, str(path)]) == 2
    assert "line 1 has no mask: write [MASK]" in capsys.readouterr().err


def test_any_encoder_embeds(filler, writer, tmp_path, capsys):
    path = tmp_path / "texts.txt"
    path.write_text("the cat\n")
    assert main(["predict", filler, str(path), "--embed"]) == 0
    vector = pytest.approx(regard.load(filler).embed(["the cat"])[0].tolist(), abs=1e-6)
    assert json.loads(lines(capsys)[0]) == vector
    assert main(["predict", filler, str(path), "--embed", "--json"]) == 0
    assert json.loads(lines(capsys)[0]) == [{"vector": vector, "cut": False}]
    assert main(["predict", writer, str(path), "--embed"]) == 2
    assert "come of an encoder that reads texts" in capsys.readouterr().err


# Options


@pytest.mark.parametrize(
    ("which", "given", "told"),
    [
        ("filler", ["--temperature", "0.5"], "nothing to do with --temperature; its options: --num-return, --truncate"),
        ("filler", ["--top-k", "3"], "nothing to do with --top-k"),
        ("writer", ["--language", "en"], "nothing to do with --language"),
        ("writer", ["--task", "translate"], "nothing to do with --task"),
        ("writer", ["--timestamps"], "nothing to do with --timestamps"),
        ("writer", ["--text", "a cat"], "nothing to do with --text"),
        ("filler", ["--stream"], "nothing to do with --stream"),
        ("writer", ["--attention", "--json"], "has no source"),
        ("writer", ["--attention"], "say --json as well"),
        ("writer", ["--stream", "--json"], "leave out --stream"),
        ("writer", ["--stream", "--speculate", "2"], "leave one out"),
        ("writer", ["--pool", "mean"], "come of an encoder"),
        ("writer", ["--similarity"], "come of an encoder"),
        (
            "filler",
            ["--similarity", "--temperature", "1"],
            "its options: --truncate, --pool, --normalize, --similarity, --out",
        ),
    ],
)
def test_options_that_mean_nothing(which, given, told, tmp_path, capsys, request):
    path = tmp_path / "texts.txt"
    path.write_text("the [MASK]\n")
    assert main(["predict", request.getfixturevalue(which), str(path), *given]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


# Streams


def test_a_single_prompt_is_streamed_to_a_terminal(writer, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(regard.tasks.run.Run, "stream", lambda self, text, config: seen.append(text) or iter(["!"]))
    path = tmp_path / "prompts.txt"
    for text, wanted in (("the cat\n", ["the cat"]), ("the cat\na dog\n", []), ("", [])):
        path.write_text(text)
        for more, streams in (
            ([], True),
            (["--no-stream"], False),
            (["--json"], False),
            (["--beam", "2"], False),
            (["--speculate", "2"], False),
        ):
            seen.clear()
            out = Terminal()
            monkeypatch.setattr(sys, "stdout", out)
            assert main(["predict", writer, str(path), "--max-new-tokens", "2", *more]) == 0
            assert seen == (wanted if streams else [])
            assert len(out.getvalue().splitlines()) == len(text.splitlines())


def test_prompts_that_are_typed_are_streamed_one_by_one(writer, monkeypatch):
    class Typed(io.TextIOWrapper):
        def isatty(self):
            return True

    out, told = Terminal(), []
    monkeypatch.setattr(
        regard.tasks.run.Run, "stream", lambda self, text, config: told.append(text) or iter(["a", "b"])
    )
    monkeypatch.setattr(sys, "stdin", Typed(io.BytesIO(b"the cat\na dog\n")))
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["predict", writer]) == 0
    assert out.getvalue() == "ab\nab\n"
    assert told == ["the cat", "a dog"]


def test_nothing_is_streamed_into_a_file(writer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(regard.tasks.run.Run, "stream", lambda self, text, config: pytest.fail("streamed"))
    path = tmp_path / "prompt.txt"
    path.write_text("the cat\n")
    assert main(["predict", writer, str(path), "--max-new-tokens", "2"]) == 0
    assert len(lines(capsys)) == 1


# Pictures and recordings


class Seen(NamedTuple):
    text: str
    score: float
    pieces: list
    logprob: float | None = None


class Face:
    """What answers with a model of pictures, as far as the command line looks."""

    takes, options, pairs, note, config = "images", ("num_return", "text"), True, "", DecodeConfig()

    def read(self, files):
        return (Path(file).read_text() for file in files)

    def answers(self, inputs, config):
        for one in inputs:
            yield [
                Seen(f"{one} {name}", 0.5, [Seen("in", 1.0, [])], math.log(0.5))
                for name in self.text[: config.num_return]
            ]


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.tasks.load.load", lambda run, device, int8: Face())
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        path.write_text(path.stem)
    return list(map(str, paths))


def test_files_are_inputs_by_themselves(pictures, capsys):
    assert main(["predict", "run", pictures[0], "--text", "cat", "--text", "dog"]) == 0
    assert lines(capsys) == ["a cat\t0.500"]
    assert main(["predict", "run", *pictures, "--text", "cat", "--text", "dog", "--num-return", "2"]) == 0
    assert lines(capsys) == [f"{file}\t{stem} {name}\t0.500" for file, stem in zip(pictures, "ab", strict=True)
                             for name in ("cat", "dog")]  # fmt: skip
    assert main(["predict", "run", *pictures, "--text", "cat", "--json"]) == 0
    told = [json.loads(line) for line in lines(capsys)]
    assert [one["file"] for one in told] == pictures
    assert told[0]["answers"] == [
        {
            "text": "a cat",
            "score": 0.5,
            "pieces": [{"text": "in", "score": 1.0, "pieces": []}],
            "logprob": math.log(0.5),
        }
    ]


def test_files_have_to_be_named(pictures, capsys):
    for files in ([], ["-"], [*pictures, "no.png"]):
        assert main(["predict", "run", *files, "--text", "cat"]) == 2
        error = capsys.readouterr().err
        assert (
            "there is no file 'no.png'" if "no.png" in files else "this model takes images: name the files"
        ) in error


# How good it is


def test_evaluate(writer, filler, tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    assert main(["evaluate", filler, "--data", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["scores"]) == {"loss", "accuracy"}
    assert main(["evaluate", filler, "--data", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == told["scores"], "the same is hidden every time"
    assert main(["evaluate", writer, "--data", str(path), "--metric", "perplexity"]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main(["evaluate", writer]) == 2
    assert "name some with --data" in capsys.readouterr().err
    assert main(["evaluate", filler, "--data", str(path), "--memory", "3"]) == 2
    assert "--memory is for a language model" in capsys.readouterr().err
    assert main(["evaluate", filler, "--data", str(path), "--beam", "3"]) == 2
    assert "nothing to do with --beam" in capsys.readouterr().err
    assert main(["evaluate", filler, "--data", str(path), "--metric", "bleu"]) == 2
    assert "the metric 'bleu' means nothing for this model" in capsys.readouterr().err


def test_evaluate_likeness(tmp_path, words, capsys):
    run = write(tmp_path / "run", "minilm", words)
    path = tmp_path / "pairs.tsv"
    rows = [("the cat", "a dog"), ("cat", "cat"), ("on the mat", "a dog and a cat"), ("a dog", "the dog")]
    path.write_text("".join(f"{one}\t{other}\t{5 - i}\n" for i, (one, other) in enumerate(rows)))
    assert main(["evaluate", run, "--data", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["scores"]
    cosines = regard.load(run).cosines(rows)
    wanted = torch.corrcoef(torch.stack((cosines, torch.tensor([5.0, 4, 3, 2]))))[0, 1]
    assert told["pearson"] == pytest.approx(100 * wanted.item(), abs=1e-3)
