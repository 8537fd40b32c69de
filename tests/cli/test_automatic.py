"""`regard train --data FILE` and nothing else: what is made of a table, and what is refused in one sentence."""

import json

import pytest

from regard.cli import main
from regard.train.kinds import are_tags

WORDS = ("an", "apple", "bee", "cat", "dog", "egg", "fig", "goat", "hen", "ice")
TEXTS = [f"{one} {two} {three}" for one in WORDS for two in WORDS for three in WORDS[:3]]
SMALL = ("--set", "model.width=16", "--set", "model.heads=2")


def label(text):
    return "yes" if text[0] in "ae" else "no"


def write(path, rows, mark="\t"):
    path.write_text("".join(mark.join(map(str, row)) + "\n" for row in rows))
    return path


def train(data, tmp_path, *more):
    return main(["train", "--data", str(data), "--steps", "2", "--out", str(tmp_path / "run"), *more])


def job(tmp_path):
    return json.loads((tmp_path / "run" / "run.json").read_text())["job"]


NUMBERED = {
    "first.csv": [(i, text, label(text)) for i, text in enumerate(TEXTS)],
    "last.csv": [(text, label(text), i + 7) for i, text in enumerate(TEXTS)],
    "gaps.csv": [(3 * i + 100, text, label(text)) for i, text in enumerate(TEXTS)],
}


@pytest.mark.parametrize("name", NUMBERED)
def test_row_numbers_are_left_out(name, tmp_path, capsys):
    rows = NUMBERED[name]
    assert train(write(tmp_path / name, rows, ","), tmp_path) == 0
    told = capsys.readouterr().out
    column = 2 if name == "last.csv" else 0
    assert f"column {column} numbers the lines" in " ".join(told.split())
    assert job(tmp_path)["recipe"] == "fasttext"
    assert job(tmp_path)["columns"] == ("0,1" if column else "1,2")


@pytest.mark.parametrize("numbered", [False, True])
def test_labels_may_stand_first(numbered, tmp_path, capsys):
    rows = [(i, label(text), text)[0 if numbered else 1 :] for i, text in enumerate(TEXTS)]
    assert train(write(tmp_path / "turned.tsv", rows), tmp_path) == 0
    assert "holds 2 labels" in " ".join(capsys.readouterr().out.split())
    assert (job(tmp_path)["recipe"], job(tmp_path)["columns"]) == ("fasttext", "2,1" if numbered else "1,0")


MAIL = [(f"mail_{7 * i}x", f"dear {text} , {text}", f"on {text}") for i, text in enumerate(TEXTS)]
CREDITS = [(text, text[::-1], f"CC-BY 2.0 (France) Attribution: tatoeba.org #{i}") for i, text in enumerate(TEXTS)]
RATED = [(text, text[::-1], label(text)) for text in TEXTS]
SEVERAL = {
    "mail.csv": (MAIL, "transformer-preln", "1,2", "column 0 holds ids and is left out"),
    "named-mail.csv": ([("mailId", "messageBody", "subj"), *MAIL], "transformer-preln", "messageBody,subj", "mailId"),
    "credits.tsv": (CREDITS, "transformer-preln", "0,1", "column 2 holds attributions and is left out"),
    "same.tsv": ([(*row[:2], "x.org") for row in CREDITS], "transformer-preln", "0,1", "is the same in all lines"),
    "rated.tsv": (RATED, "word-averaging", "0,1,2", "two texts and an answer"),
    "four.tsv": ([(f"q{i}", *row) for i, row in enumerate(RATED)], "word-averaging", "1,2,3", "holds ids"),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_columns_that_cannot_be_learned_from_are_left_out(name, tmp_path, capsys):
    rows, recipe, columns, why = SEVERAL[name]
    assert train(write(tmp_path / name, rows), tmp_path, *SMALL) == 0
    assert why in " ".join(capsys.readouterr().out.split())
    assert (job(tmp_path)["recipe"], job(tmp_path)["columns"]) == (recipe, columns)


def test_columns_without_a_clear_meaning_are_listed(tmp_path, capsys):
    reviews = [(f"r{i}", WORDS[i % 7], f"it is {text}", i % 5 + 1) for i, text in enumerate(TEXTS)]
    data = write(tmp_path / "reviews.csv", [("review_id", "product", "review_text", "stars"), *reviews], ",")
    assert train(data, tmp_path) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "4 columns" in told
    assert "review_id ('r0'), product ('an'), review_text ('it is an an an'), stars ('1')" in told
    assert "say --columns review_text,stars for a text and its label" in told
    assert train(data, tmp_path, "--columns", "review_text,stars") == 0
    assert job(tmp_path)["recipe"] == "fasttext"


def test_a_bad_line_is_told_where_the_columns_are_known(tmp_path, capsys):
    rows = [("id", "text", "label"), *((f"q{i}", text, label(text) if i else "") for i, text in enumerate(TEXTS))]
    assert train(write(tmp_path / "rows.tsv", rows), tmp_path) == 2
    assert "line 2: column 'label' is empty" in " ".join(capsys.readouterr().err.split())


def test_a_label_words_and_tags(tmp_path, capsys):
    rows = [(label(text), text, tags(text)) for text in TEXTS]
    data = write(tmp_path / "slots.tsv", rows)
    assert train(data, tmp_path) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "--columns 1,2 for words with their tags, or --columns 1,0 for a text and its label" in told
    assert train(data, tmp_path, "--columns", "1,2", *SMALL) == 0
    assert job(tmp_path)["task"] == "tag"


def test_row_numbers_beside_pairs(tmp_path, capsys):
    rows = [(i, text, text[::-1]) for i, text in enumerate(TEXTS)]
    assert train(write(tmp_path / "pairs.tsv", rows), tmp_path, *SMALL) == 0
    assert (job(tmp_path)["recipe"], job(tmp_path)["columns"]) == ("transformer-preln", "1,2")


def test_row_numbers_under_a_name_nobody_knows(tmp_path, capsys):
    rows = [("nr", "was", "wie"), *((i, text, label(text)) for i, text in enumerate(TEXTS))]
    assert train(write(tmp_path / "named.tsv", rows), tmp_path, "--header", "yes") == 0
    assert (job(tmp_path)["recipe"], job(tmp_path)["columns"]) == ("fasttext", "was,wie")


REFUSED = {
    "two.tsv": ([(i, text) for i, text in enumerate(TEXTS)], "--columns 0,1"),
    "every.tsv": ([(i, i + 1, i + 2) for i, _ in enumerate(TEXTS)], "--columns"),
    "ratings.tsv": ([(text, round(i * 0.013, 2)) for i, text in enumerate(TEXTS)], "--task classify"),
    "numbered-ratings.tsv": ([(i, text, round(i * 0.013, 2)) for i, text in enumerate(TEXTS)], "--task classify"),
    "whole.tsv": ([(text, 7919 * i % 1000) for i, text in enumerate(TEXTS)], "--task classify"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nobody_can_know_is_asked(name, tmp_path, capsys):
    rows, words = REFUSED[name]
    assert train(write(tmp_path / name, rows), tmp_path) == 2
    told = capsys.readouterr().err
    assert words in " ".join(told.split())
    assert "Traceback" not in told
    assert not (tmp_path / "run" / "run.json").exists()


def test_columns_that_are_named_are_taken(tmp_path):
    rows, _ = REFUSED["two.tsv"]
    assert train(write(tmp_path / "two.tsv", rows), tmp_path, "--columns", "0,1", *SMALL) == 0
    assert job(tmp_path)["recipe"] == "transformer-preln"


def test_stars_are_labels(tmp_path):
    rows = [(text, (i % 9 + 2) / 2) for i, text in enumerate(TEXTS)]
    assert train(write(tmp_path / "stars.tsv", rows), tmp_path) == 0
    assert job(tmp_path)["recipe"] == "fasttext"


def test_a_tab_in_the_first_line_makes_no_table(tmp_path, capsys):
    data = tmp_path / "story.txt"
    data.write_text("The Story\tby Nobody\n\n" + "".join(f"{text}.\n" for text in TEXTS))
    assert train(data, tmp_path, "--set", "train.context_length=16", "--set", "model.width=16") == 0
    assert "a running text" in " ".join(capsys.readouterr().out.split())
    assert job(tmp_path)["recipe"] == "rwkv4"


@pytest.mark.parametrize("bad", [1, 40, 80])
def test_a_text_that_may_be_a_table(bad, tmp_path, capsys):
    """The way out is named for both."""
    rows = [(text,) if i < bad else (text, label(text)) for i, text in enumerate(TEXTS)]
    assert train(write(tmp_path / "rows.txt", rows[::-1] if bad == 1 else rows), tmp_path) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "if it is a running text, name a recipe for it: regard train rwkv4" in told
    assert ("call it .tsv" in told) == (bad > 20)


def tags(text):
    return " ".join("B-NP" if word in ("an", "egg") else "O" for word in text.split())


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("header", [False, True])
def test_words_with_as_many_tags_are_tagged(order, header, tmp_path, capsys):
    rows = [("words", "tags")[::order]] * header + [(text, tags(text))[::order] for text in TEXTS]
    assert train(write(tmp_path / "slots.tsv", rows), tmp_path, *SMALL) == 0
    assert "as many tags as words" in " ".join(capsys.readouterr().out.split())
    assert (job(tmp_path)["recipe"], job(tmp_path)["task"]) == ("transformer-encoder", "tag")
    assert job(tmp_path)["columns"] == (None if header or order == 1 else "1,0")


def test_parts_of_speech_are_tags_and_reversed_words_are_not():
    kinds = {word: "VERB" if word in ("egg", "ice") else "NOUN" for word in WORDS}
    rows = [(text, " ".join(kinds[word] for word in text.split())) for text in TEXTS]
    assert are_tags(rows)
    assert not are_tags([(text, text[::-1]) for text in TEXTS])
    assert not are_tags([*rows, ("an apple", "NOUN")])
    assert not are_tags([(word, kinds[word]) for word in WORDS])


def test_labels_named_first_are_told_of(tmp_path, capsys):
    """The order was given, so it is kept."""
    data = write(tmp_path / "stars.tsv", [("stars", "review_text"), *((label(text), text) for text in TEXTS)])
    assert train(data, tmp_path, "--columns", "stars,review_text", "--dev", "0", "--test", "0", *SMALL) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "note: column stars looks like labels ('no', 'yes')" in told
    assert "say --columns review_text,stars" in told
    assert (job(tmp_path)["recipe"], job(tmp_path)["columns"]) == ("transformer-preln", "stars,review_text")


@pytest.mark.parametrize("recipe", [[], ["transformer-encoder"]])
@pytest.mark.parametrize("task", ["foo", "clasify", "pairs", "text"])
def test_an_unknown_task_is_one_sentence(recipe, task, tmp_path, capsys):
    data = write(tmp_path / "labels.tsv", [(text, label(text)) for text in TEXTS])
    assert main(["train", *recipe, "--data", str(data), "--task", task, "--steps", "2"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"unknown task '{task}'" in told
    assert "(known: classify, match, tag)" in told
    assert ("did you mean 'classify'" in told) == (task == "clasify")
