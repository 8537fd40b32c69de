"""First runs through the real flow: what is chosen for small data, and what a user has said that must stay."""

import json
import random
import time

import pytest
import torch

from regard.files import recipe as recipes
from regard.runs.job import Job
from regard.tasks.match import Matches
from regard.train import automatic
from regard.train.job import start

GOOD, BAD = ("lovely", "splendid", "superb", "charming"), ("awful", "dreadful", "dull", "tedious")
FILLERS = [f"word{i}" for i in range(40)]


def write(path, rows):
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def reviews(count, seed=0):
    """Texts of random words, one of which tells the label."""
    chance, rows = random.Random(seed), []
    for _ in range(count):
        label = chance.choice(("good", "bad"))
        words = [*chance.sample(FILLERS, 5), chance.choice(GOOD if label == "good" else BAD)]
        chance.shuffle(words)
        rows.append((" ".join(words), label))
    return rows


@pytest.fixture
def labels(tmp_path):
    return write(tmp_path / "labels.tsv", reviews(400))


def run(data, out, *overrides, recipe="fasttext", size="tiny", **given):
    said: list[str] = []
    given = {"dev": "50", "test": "0"} | given
    return start(Job(recipe, str(out), size, list(overrides), str(data), **given), said.append), said


def chosen(prepared):
    told = json.loads((prepared.folder / "run.json").read_text())["chosen"]
    return {choice["key"]: choice["value"] for choice in told}


def line(said):
    (sentence,) = [one for one in said if one.startswith("chosen:")]
    return sentence


# ------------------------------------------------------------------------------------------------------- small data


def test_few_texts_are_learned_from(labels, tmp_path):
    prepared, said = run(labels, tmp_path / "run")
    made = prepared.train()
    unseen = reviews(200, seed=1)
    answers = made.predict([text for text, _ in unseen])
    right = sum(best[0].text == label for best, (_, label) in zip(answers, unseen, strict=True))
    assert right > 0.9 * len(unseen)
    assert prepared.trainer.step >= 3 * automatic.MIN_STEPS_PER_EPOCH
    assert "2 labels want 120 steps" in line(said)


def test_common_words_outvote_rare_ones(tmp_path):
    """Each number stands once in either label, so that a number that was met once tells the wrong one."""
    rows = [(f"{word} film number {i}", label) for i in range(200) for word, label in (("good", "+"), ("bad", "-"))]
    random.Random(0).shuffle(rows)
    prepared, _ = run(write(tmp_path / "films.tsv", rows[:350]), tmp_path / "run")
    answers = prepared.train().predict([text for text, _ in rows[350:]])
    assert [best[0].text for best in answers] == [label for _, label in rows[350:]]


def test_many_texts_are_gone_through_a_few_times(tmp_path):
    """A pass has steps enough, and more of them would be learned by heart."""
    data = write(tmp_path / "many.tsv", reviews(16_000))
    prepared, _ = run(data, tmp_path / "run", dev="50")
    assert prepared.settings.epochs == 3


# ------------------------------------------------------------------------------------------- an end that is given


@pytest.mark.parametrize(("bound", "value"), [("steps", 700), ("epochs", 2.0)])
def test_an_end_that_was_given_is_the_end(labels, tmp_path, bound, value):
    prepared, said = run(labels, tmp_path / "run", f"train.{bound}={value}")
    assert getattr(prepared.settings, bound) == value
    assert [name for name in ("steps", "epochs", "minutes") if getattr(prepared.settings, name)] == [bound]
    assert "epochs" not in line(said)


def test_steps_of_a_recipe_file_are_the_end(labels, tmp_path):
    written = recipes.FOLDER.joinpath("fasttext.toml").read_text()
    own = tmp_path / "own.toml"
    own.write_text(written.replace("[train]", "[train]\nsteps = 700"))
    prepared, _ = run(labels, tmp_path / "run", recipe=str(own))
    assert (prepared.settings.steps, prepared.settings.epochs) == (700, 0)


def test_it_is_told_that_the_minutes_may_not_be_used_up(labels, tmp_path):
    prepared, said = run(labels, tmp_path / "run", "train.minutes=7")
    assert prepared.settings.minutes == 7
    assert f"the run ends after {prepared.settings.epochs:g} epochs, even if its 7 minutes are not over" in line(said)


# --------------------------------------------------------------------------------------- a recipe file of one's own


def test_the_model_of_a_recipe_file_stays(tmp_path):
    data = write(tmp_path / "pairs.tsv", [(f"number {i}", f"Zahl {i}") for i in range(300)])
    own = tmp_path / "own.toml"
    written = recipes.FOLDER.joinpath("transformer-preln.toml").read_text()
    assert "dropout = 0.1" in written
    own.write_text(written.replace("dropout = 0.1", "dropout = 0.0").replace("dropout = 0.3", "dropout = 0.0"))
    small = ("train.steps=2", "model.width=16", "model.heads=2")
    prepared, said = run(data, tmp_path / "run", *small, recipe=str(own))
    assert prepared.recipe["model"]["dropout"] == 0.0
    assert "dropout" not in line(said)
    built_in, _ = run(data, tmp_path / "other", *small, recipe="transformer-preln")
    assert chosen(built_in)["model.dropout"] == built_in.recipe["model"]["dropout"] > 0


SMALL = ("model.width=12", "model.heads=2", "model.depth=1", "model.layer.0.feedforward.hidden=16")


@pytest.fixture
def encoder(labels, tmp_path):
    """A run of an encoder that labels."""
    prepared, _ = run(labels, tmp_path / "encoder", "train.steps=2", *SMALL, recipe="transformer-encoder",
                      task="classify")  # fmt: skip
    prepared.train()
    return tmp_path / "encoder"


def test_a_recipe_file_counts_in_fine_tuning(labels, encoder, tmp_path):
    own = tmp_path / "my.toml"
    written = (encoder / "recipe.toml").read_text().partition("[train]")[0]
    own.write_text(written + "[train]\nlr = 0.123\nwarmup = 3\n")
    given = {"recipe": str(own), "size": None, "origin": str(encoder), "task": "classify"}
    prepared, _ = run(labels, tmp_path / "run", "train.steps=2", **given)
    assert (prepared.settings.lr, prepared.settings.warmup) == (0.123, 3)
    assert chosen(prepared)["train.freeze"] == "embed"


# ---------------------------------------------------------------------------------------------------------- going on


@pytest.fixture
def words(labels, tmp_path):
    """A run of word vectors that has only begun to learn."""
    prepared, _ = run(labels, tmp_path / "words", "train.steps=2")
    prepared.train()
    return tmp_path / "words"


@pytest.mark.parametrize("task", [None, "classify"])
def test_word_vectors_go_on_learning(words, tmp_path, task):
    """They are all that such a model knows."""
    more = write(tmp_path / "more.tsv", reviews(400, seed=2))
    prepared, said = run(more, tmp_path / "run", recipe="", size=None, origin=str(words), task=task)
    assert prepared.settings.freeze == 0
    made = prepared.train()
    unseen = reviews(200, seed=1)
    answers = made.predict([text for text, _ in unseen])
    right = sum(best[0].text == label for best, (_, label) in zip(answers, unseen, strict=True))
    assert right > 0.9 * len(unseen), line(said)


def test_only_a_head_that_is_new_is_treated_as_new(labels, encoder, tmp_path):
    given = {"recipe": "", "size": None, "origin": str(encoder)}
    again, _ = run(labels, tmp_path / "again", "train.steps=2", **given)
    new, _ = run(labels, tmp_path / "new", "train.steps=2", task="classify", **given)
    assert (again.settings.freeze, new.settings.freeze) == (0, "embed")
    assert again.settings.lr == chosen(again)["train.lr"] > 5e-5
    assert again.settings.batch_size == 0
    assert new.settings.batch_size == automatic.FINE_TUNING_BATCH_SIZE


# -------------------------------------------------------------------------------------------- what the rules go by


def matches(count=200):
    chance = random.Random(0)
    texts = [" ".join(chance.sample(FILLERS, 5)) for _ in range(count)]
    return [(text, f"{text} {text}", chance.choice(("yes", "no"))) for text in texts]


def passes(prepared):
    """As they are told in the reason for the dropout."""
    told = json.loads((prepared.folder / "run.json").read_text())["chosen"]
    (why,) = [choice["why"] for choice in told if choice["key"] == "model.dropout"]
    return float(why.removeprefix("about ").partition(" ")[0])


def test_both_texts_of_a_match_count(tmp_path):
    data = write(tmp_path / "pairs.tsv", matches())
    given = {"recipe": "transformer-encoder", "task": "match", "tokenizer": "words"}
    prepared, _ = run(data, tmp_path / "run", "train.steps=40", "train.batch_tokens=300", *SMALL, **given)
    positions = sum(17 for _ in prepared.corpus.train)  # five words and ten, and the ends of both
    assert passes(prepared) == pytest.approx(40 * 300 / positions, rel=0.1)


@pytest.mark.parametrize(
    "given", [("train.batch_size=3",), ("train.batch_tokens=90",), ("train.batch_size=3", "train.batch_tokens=9000")]
)
def test_the_passes_over_a_text_are_those_of_its_real_batches(tmp_path, given):
    path = tmp_path / "text.txt"
    path.write_text("It was the age of wisdom, it was the age of folly.\n" * 400)
    small = ("model.width=12", "model.heads=2", "model.depth=1", "train.context_length=30", "train.steps=100")
    prepared, _ = run(path, tmp_path / "run", *small, *given, recipe="transformer-decoder", dev="0.1", test="0.1")
    positions = sum(len(text) for (text,) in prepared.corpus.train)
    assert passes(prepared) == pytest.approx(100 * 3 * 30 / positions, rel=0.1)


def test_a_busy_machine_chooses_the_same(tmp_path, monkeypatch):
    data = write(tmp_path / "pairs.tsv", [(f"number {i}", f"Zahl {i}") for i in range(300)])
    small = ("train.minutes=0.02", "model.width=16", "model.heads=2")
    one, _ = run(data, tmp_path / "one", *small, recipe="transformer-preln")
    plain = torch.Tensor.__matmul__

    def slow(a, b):
        time.sleep(0.02)
        return plain(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", slow)
    two, _ = run(data, tmp_path / "two", *small, recipe="transformer-preln")
    assert passes(one) == passes(two)
    assert chosen(one) == chosen(two)


def test_the_header_is_looked_for_once(tmp_path, monkeypatch):
    data = write(tmp_path / "pairs.tsv", matches())
    calls = []
    for name in ("check_header", "check_labels"):
        before = getattr(Matches, name)
        monkeypatch.setattr(Matches, name, lambda self, corpus, f=before, n=name: (calls.append(n), f(self, corpus))[1])
    run(data, tmp_path / "run", "train.steps=2", *SMALL, recipe="transformer-encoder", task="match")
    assert sorted(calls) == ["check_header", "check_labels"]
