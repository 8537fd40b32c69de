"""Files like the one that a run was trained with: their columns are known to evaluate and predict."""

import json

import pytest

from regard.cli import main

WORDS = ("an", "apple", "bee", "cat", "dog", "egg", "fig", "goat", "hen", "ice")
TEXTS = [f"{one} {two} {three}" for one in WORDS for two in WORDS for three in WORDS[:3]]
SMALL = ("--set", "model.width=16", "--set", "model.heads=2")


def label(text):
    return "yes" if text[0] in "ae" else "no"


def tags(text):
    return " ".join("B-NP" if word in ("an", "egg") else "O" for word in text.split())


def write(path, rows, mark="\t"):
    path.write_text("".join(mark.join(map(str, row)) + "\n" for row in rows))
    return path


def trained(folder, rows, *more):
    data = write(folder / "train.tsv", rows)
    assert main(["train", "--data", str(data), "--steps", "2", "--out", str(folder / "run"), *more]) == 0
    return folder / "run"


def told(capsys):
    """What was written since the last time: to the output, and to the errors in one line."""
    out, err = capsys.readouterr()
    return out, " ".join(err.split())


def evaluated(run, data, capsys, *more):
    told(capsys)
    assert main(["evaluate", str(run), "--data", str(data), "--json", *more]) == 0
    return json.loads(told(capsys)[0])


def predicted(run, data, capsys):
    told(capsys)
    assert main(["predict", str(run), str(data)]) == 0
    return told(capsys)[0].splitlines()


@pytest.fixture(scope="module")
def labeller(tmp_path_factory):
    """Its labels stand first."""
    return trained(tmp_path_factory.mktemp("labeller"), [(label(text), text) for text in TEXTS])


@pytest.fixture(scope="module")
def tagger(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("tagger"), [(text, tags(text)) for text in TEXTS], *SMALL)


def test_columns_in_the_order_of_training(labeller, tmp_path, capsys):
    turned = write(tmp_path / "turned.tsv", [(label(text), text) for text in TEXTS[:20]])
    usual = write(tmp_path / "usual.tsv", [(text, label(text)) for text in TEXTS[:20]])
    plain = write(tmp_path / "plain.txt", [(text,) for text in TEXTS[:20]])
    named = write(tmp_path / "named.tsv", [("text", "label"), *((text, label(text)) for text in TEXTS[:20])])
    scores = evaluated(labeller, turned, capsys)["scores"]
    assert scores == evaluated(labeller, usual, capsys, "--columns", "0,1")["scores"]
    assert scores == evaluated(labeller, named, capsys)["scores"]
    assert predicted(labeller, turned, capsys) == predicted(labeller, plain, capsys)
    assert main(["evaluate", str(labeller), "--data", str(usual)]) == 2
    assert "none of the labels of this data" in told(capsys)[1]


def test_other_columns_are_asked_about(labeller, tmp_path, capsys):
    three = write(tmp_path / "three.tsv", [(label(text), text, "x") for text in TEXTS[:20]])
    assert main(["evaluate", str(labeller), "--data", str(three)]) == 2
    assert "the run was trained with --columns 1,0" in told(capsys)[1]
    assert main(["predict", str(labeller), str(three)]) == 2
    assert "has 3 columns, and the run was trained with the columns 1,0" in told(capsys)[1]


def test_names_of_columns_are_known_without_a_header(tmp_path, capsys):
    rows = [(i, label(text), text) for i, text in enumerate(TEXTS)]
    run = trained(tmp_path, [("nr", "wie", "was"), *rows], "--header", "yes")
    assert json.loads((run / "run.json").read_text())["table"]["taken"] == ["was", "wie"]
    files = {
        "bare.tsv": rows[:20],
        "other.tsv": [("was", "wie"), *((text, kind) for _, kind, text in rows[:20])],
        "texts.tsv": [("was",), *((text,) for _, _, text in rows[:20])],
    }
    paths = [write(tmp_path / name, some) for name, some in files.items()]
    one, two = (evaluated(run, path, capsys)["scores"] for path in paths[:2])
    assert one == two
    answers = [predicted(run, path, capsys) for path in paths]
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 20


def test_words_are_tagged_without_their_tags(tagger, tmp_path, capsys):
    some = TEXTS[40:60]
    plain = write(tmp_path / "plain.txt", [(text,) for text in some])
    table = write(tmp_path / "table.tsv", [(text, tags(text)) for text in some])
    lines = ("\n".join(f"{w}\t{t}" for w, t in zip(text.split(), tags(text).split(), strict=True)) for text in some)
    conll = tmp_path / "words.conll"
    conll.write_text("\n\n".join(lines) + "\n")
    answers = predicted(tagger, plain, capsys)
    assert answers == predicted(tagger, table, capsys) == predicted(tagger, conll, capsys)
    assert evaluated(tagger, table, capsys)["scores"] == evaluated(tagger, conll, capsys)["scores"]


def test_an_empty_text_of_a_table_is_told(labeller, tmp_path, capsys):
    path = write(tmp_path / "gap.tsv", [("yes", "an apple"), ("no", "")])
    assert main(["predict", str(labeller), str(path)]) == 2
    assert "gap.tsv, line 2: column 1 is empty" in told(capsys)[1]


def test_labels_may_stand_first_for_a_run_from_another(labeller, tmp_path, capsys):
    data = write(tmp_path / "turned.tsv", [(label(text), text) for text in TEXTS])
    for name, more in (("same", []), ("task", ["--task", "classify"])):
        out = tmp_path / name
        assert (
            main(["train", "--from", str(labeller), "--data", str(data), "--steps", "2", "--out", str(out), *more]) == 0
        )
        assert "picked: --columns 1,0" in told(capsys)[0]
        assert json.loads((out / "run.json").read_text())["job"]["columns"] == "1,0"
