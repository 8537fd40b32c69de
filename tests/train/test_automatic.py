"""What is chosen where nothing is said: by rules that can be told, and never against what was said."""

import itertools
import json
import shutil

import pytest
import torch

from regard import UserError
from regard.files import recipe as recipes
from regard.runs.job import Job
from regard.train import automatic
from regard.train.automatic import Facts
from regard.train.job import start
from regard.train.pick import DataArguments, pick

FACTS = Facts("Pairs", 128, 2_000_000, 29_000, 800_000.0, 9.0)


def by_key(choices) -> dict:
    return {choice.key: choice.value for choice in choices}


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    lines = [f"the number {i} is here\tdie Zahl {i} ist hier" for i in range(400)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make(pairs, tmp_path, *overrides, **given):
    said: list[str] = []
    job = Job("transformer-preln", str(tmp_path / "run"), "tiny", list(overrides), str(pairs), **given)
    return start(job, said.append), said


def test_words_and_their_ngrams_are_seen_a_few_times():
    words = FACTS._replace(whole_words=True, steps=400)
    few, many = (by_key(automatic.choose_from_scratch(words._replace(classes=n))) for n in (2, 77))
    assert few == {"train.epochs": 3.0}
    assert many["train.epochs"] > 10


def test_only_a_new_head_freezes_the_embeddings():
    """Those of a language model are its head, too."""
    known = FACTS._replace(new_head=True)
    reads, writes = (by_key(automatic.choose_for_fine_tuning(known._replace(task=task))) for task in ("Labels", "Text"))
    assert reads["train.freeze"] == "embed"
    assert writes == {}


def test_choosing_draws_nothing(pairs, tmp_path):
    """Weights at birth are those of the seed, whatever was chosen before."""
    given = ("train.minutes=1", "train.lr=0.01", "model.dropout=0.1", "model.width=16", "model.heads=2")
    first, _ = make(pairs, tmp_path, *given)
    second = start(Job("transformer-preln", str(tmp_path / "two"), "tiny", list(given), str(pairs), as_published=True,
                       vocab=first.job.vocab), lambda sentence: None)  # fmt: skip
    wanted = first.model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in second.model.state_dict().items())


def test_the_speed_of_a_device_is_not_that_of_the_cpu():
    assert automatic.flops_per_second("cuda:1") == automatic.FLOPS_PER_SECOND["cuda"]
    assert automatic.flops_per_second("cpu") == automatic.FLOPS_PER_SECOND["cpu"] * torch.get_num_threads()


def test_wide_models_learn_slower():
    rates = [by_key(automatic.choose_from_scratch(FACTS._replace(width=w)))["train.lr"] for w in (64, 128, 512, 1024)]
    assert rates[0] == rates[1] > rates[2] > rates[3] > 0


@pytest.mark.parametrize("bound", ["steps", "minutes", "epochs"])
def test_an_end_that_is_given_stays(bound):
    assert automatic.choose_end({bound: 3}, False) == []
    assert by_key(automatic.choose_end({}, False)) == {"train.minutes": automatic.DEFAULT_MINUTES}
    assert by_key(automatic.choose_end({}, True)) == {"train.epochs": automatic.FINE_TUNING_EPOCHS}


def test_all_is_told_and_kept(pairs, tmp_path):
    prepared, said = make(pairs, tmp_path, "train.steps=3")
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["chosen"]
    chosen = {choice["key"]: choice["value"] for choice in kept}
    written = recipes.read(tmp_path / "run" / "recipe.toml")
    assert chosen["train.optimizer"] == written["train"]["optimizer"] == prepared.settings.optimizer == "muon"
    assert chosen["model.dropout"] == written["model"]["dropout"]
    assert chosen["vocab"] >= prepared.task.source.size
    (sentence,) = [one for one in said if one.startswith("chosen:")]
    assert all(key.rpartition(".")[2] in sentence for key in chosen)
    assert "\n" not in sentence


def test_what_is_given_stays(pairs, tmp_path):
    given = ("train.steps=3", "train.lr=0.0125", "train.optimizer=adam", "model.dropout=0.07", "train.batch_tokens=900")
    prepared, _ = make(pairs, tmp_path, *given, vocab=400)
    s = prepared.settings
    assert (s.lr, s.optimizer, s.batch_tokens, s.schedule) == (0.0125, "adam", 900, "linear")
    assert prepared.recipe["model"]["dropout"] == 0.07
    assert prepared.task.source.size <= 400
    kept = {c["key"] for c in json.loads((tmp_path / "run" / "run.json").read_text())["chosen"]}
    assert not kept & {"train.lr", "train.optimizer", "model.dropout", "train.batch_tokens", "vocab"}


def test_as_published(pairs, tmp_path):
    """Nothing is chosen, so that an end must be given."""
    prepared, said = make(pairs, tmp_path, "train.steps=3", as_published=True)
    assert prepared.settings.optimizer == "adam"
    assert prepared.recipe["model"]["dropout"] == 0.3
    assert not any(one.startswith("chosen:") for one in said)


WORDS = ["".join(letters) for letters in itertools.product("bdkt", "aeiou", "lmn", "aeiou", ["", "s"])]


def tokenizer_of(tmp_path, rows, **given):
    path = tmp_path / "rows.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in rows), encoding="utf-8")
    small = ("train.steps=2", "model.width=16", "model.heads=2", "model.depth=1")
    prepared, said = make(path, tmp_path, *small, header="no", **given)
    return prepared, said


@pytest.mark.parametrize(
    ("target", "other", "kind"),
    [
        (lambda word: " ".join(word.upper()), lambda word: word, "characters,pretokenised"),
        (lambda word: word, lambda word: " ".join(word.upper()), "pretokenised,characters"),
        (lambda word: word[::-1], lambda word: word, "characters"),
        (lambda word: f"what {word}ish people call a {word}", lambda word: word, "characters,bpe"),
        (lambda word: f"ein {word} und kein {word}", lambda word: f"a {word} and no {word}", None),
        (lambda word: f"all of us {word}", lambda word: "我们都有" + "".join(chr(0x4E00 + ord(c)) for c in word), None),
    ],
)
def test_single_words_are_spelled(tmp_path, target, other, kind):
    prepared, said = tokenizer_of(tmp_path, [(other(word), target(word)) for word in WORDS])
    if kind is None or "," not in kind:
        assert prepared.recipe["model"]["tie"] == "all"
    else:
        assert prepared.recipe["model"]["tie"] == "target"
        assert "tie target (two vocabularies)" in said[-1]
    assert prepared.job.tokenizer == kind
    assert prepared.train() is not None


def test_a_tokenizer_that_is_given_stays(tmp_path):
    rows = [(word, " ".join(word.upper())) for word in WORDS]
    prepared, _ = tokenizer_of(tmp_path, rows, tokenizer="bpe", vocab=300)
    assert prepared.job.tokenizer == "bpe"
    assert prepared.recipe["model"]["tie"] == "all"


@pytest.mark.parametrize("as_published", [False, True])
def test_two_vocabularies_are_not_tied(pairs, tmp_path, as_published):
    both = {"tokenizer": "characters,words", "as_published": as_published}
    prepared, _ = make(pairs, tmp_path, "train.steps=3", **both)
    assert prepared.recipe["model"]["tie"] == "target"
    assert automatic.choose_tie({"vocab": [5, 6], "model": {"tie": "source-target"}})[0].value == "none"
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UserError, match="one vocabulary"):
        make(pairs, tmp_path, "train.steps=3", "model.tie=all", **both)


def test_as_published_without_an_end(pairs, tmp_path):
    with pytest.raises(UserError, match="needs an end"):
        make(pairs, tmp_path, as_published=True)


def test_a_recipe_keeps_what_it_says(tmp_path):
    recipe = recipes.load("gat")
    assert automatic.choose_end(recipe["train"], False) == []


@pytest.mark.parametrize(
    ("name", "lines", "recipe", "task"),
    [
        ("a.tsv", [f"source {i}\ttarget {i}" for i in range(60)], "transformer-preln", None),
        ("a.tsv", [f"some text {i}\t{'good' if i < 30 else 'bad'}" for i in range(60)], "fasttext", None),
        ("a.tsv", [f"text {i}\tother {i}\t{i % 2}" for i in range(60)], "word-averaging", None),
        ("a.txt", [f"It was the age number {i} of wisdom," for i in range(60)], "rwkv4", None),
        ("a.conllu", ["word\tNOUN", "", "runs\tVERB", ""] * 9, "transformer-encoder", "tag"),
        ("a.tsv", ["word\tNOUN", "of\tADP", "", "runs\tVERB", ""] * 9, "transformer-encoder", "tag"),
        ("a.txt", ["Chapter 1", "", "It was\tdark.", "", "And cold."] * 9, "rwkv4", None),
    ],
)
def test_the_recipe_is_picked_by_the_data(tmp_path, name, lines, recipe, task):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    picked = pick(DataArguments(str(path), None, None, None, None, "refuse"), None)
    assert (picked.recipe, picked.task) == (recipe, task)


def test_parallel_files_are_pairs(tmp_path):
    for side in ("en", "de"):
        (tmp_path / f"train.{side}").write_text("a line\nanother\n", encoding="utf-8")
    assert pick(DataArguments(str(tmp_path), "en", "de", None, None, "refuse"), None).recipe == "transformer-preln"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        pick(DataArguments(str(tmp_path / "pairs.tsv"), None, None, None, None, "refuse"), None)


def test_a_folder_without_texts(tmp_path):
    (tmp_path / "cat.png").write_bytes(b"x")
    with pytest.raises(UserError, match="vit"):
        pick(DataArguments(str(tmp_path), None, None, None, None, "refuse"), None)


# ----------------------------------------------------------------------------------------------- rules, one by one


@pytest.mark.parametrize(("passes", "rate"), [(1, 0.1), (30, 0.1), (31, 0.2), (100, 0.2), (101, 0.3)])
def test_dropout_of_language_models_grows_later(passes, rate):
    facts = FACTS._replace(task="Text", passes=passes)
    assert by_key(automatic.choose_from_scratch(facts))["model.dropout"] == rate


@pytest.mark.parametrize(("passes", "rate"), [(1, 0.1), (12, 0.1), (12.1, 0.2), (40, 0.2), (41, 0.3), (1e4, 0.3)])
def test_dropout_grows_with_the_passes(passes, rate):
    assert by_key(automatic.choose_from_scratch(FACTS._replace(passes=passes)))["model.dropout"] == rate


@pytest.mark.parametrize(
    ("given", "frozen"), [({}, True), ({"lora": True}, False), ({"examples": automatic.SMALL_DATA}, False)]
)
def test_embeddings_are_frozen_for_little_data_without_lora(given, frozen):
    chosen = by_key(automatic.choose_for_fine_tuning(FACTS._replace(task="Labels", new_head=True, **given)))
    assert ("train.freeze" in chosen) == frozen


@pytest.mark.parametrize(
    ("train", "passes"),
    [
        ({"epochs": 5.0}, 5),
        ({"steps": 30}, 3),
        ({"epochs": 5.0, "steps": 30}, 3),
        ({"epochs": 2.0, "steps": 30}, 2),
        ({"minutes": 1.0}, 6),
        ({"minutes": 1.0, "epochs": 9.0}, 9),  # the speed of a machine decides nothing where something else does
    ],
)
def test_the_first_end_bounds_the_passes(train, passes):
    assert automatic._passes(train, positions=1000.0, batch=100.0, speed=100.0) == passes
