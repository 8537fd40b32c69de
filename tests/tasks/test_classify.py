"""Classifying texts: from a table to a trained run."""

import random

import pytest
import torch

import regard
from regard.core import UserError
from regard.data import FIRST_LABEL, LabeledBatches, Tokenizer
from regard.evaluate import evaluate
from regard.metrics import measure
from regard.runs.job import Job
from regard.train.job import resume, start

SMALL = [
    "model.width=16", "model.heads=2", "model.depth=1", "model.dropout=0", "model.layer.0.feedforward.hidden=24",
    "model.head.dropout=0", "train.batch_tokens=256", "train.lr=0.01", "train.warmup=5", "train.steps=120",
]  # fmt: skip


@pytest.fixture
def table(tmp_path):
    """Write words labeled by whether they begin with a vowel."""
    rng = random.Random(3)
    words = {"".join(rng.choices("abcdeinou", k=rng.randint(3, 7))) for _ in range(600)}
    lines = [f"{word}\t{'vowel' if word[0] in 'aeiou' else 'consonant'}" for word in sorted(words)]
    path = tmp_path / "words.tsv"
    path.write_text("text\tlabel\n" + "\n".join(lines) + "\n")
    return path


def job(table, run, **more):
    return Job(
        "transformer-encoder",
        str(run),
        "tiny",
        SMALL,
        str(table),
        tokenizer="characters",
        dev="60",
        test="60",
        **more,
        as_published=True,
    )


def test_learns_loads_and_labels(table, tmp_path):
    prepared = start(job(table, tmp_path / "run", metrics=["accuracy", "f1"]), print)
    made = prepared.train()
    assert prepared.trainer.metrics["accuracy"] > 90
    assert prepared.trainer.metrics["f1"] > 90
    loaded = regard.load(tmp_path / "run")
    texts = ["abcde", "bcade", "ncboib", "uubbc", "onde"]
    for run in (made, loaded):
        answers = run.predict(texts)
        assert [best[0].text for best in answers] == ["vowel", "consonant", "consonant", "vowel", "vowel"]
    alone = [loaded.predict([text])[0][0].score for text in texts]
    torch.testing.assert_close([best[0].score for best in answers], alone)
    told = evaluate(loaded, prepared.corpus.test, ["loss", "accuracy", "f1"])
    assert told["scores"]["accuracy"] > 90
    assert told["scores"]["loss"] < 0.3


def test_the_best_accuracy_is_kept_and_waited_for(table, tmp_path):
    """Accuracy decides the best model, unless the loss or another metric is asked for."""
    found = [{"loss": 0.3, "accuracy": 70.0}, {"loss": 0.5, "accuracy": 90.0}, {"loss": 0.4, "accuracy": 80.0}]
    for name, changes, step, last in (("own", [], 4, 8), ("loss", ["train.metric=loss"], 2, 6)):
        asked = job(table, tmp_path / name)
        asked.overrides = [*SMALL, "train.eval_steps=2", "train.patience=2", *changes]
        prepared = start(asked, print)
        scores = iter([*found, found[2], found[2]])
        prepared.trainer.evaluate = lambda model, scores=scores: next(scores)
        prepared.train()
        assert prepared.trainer.metrics == {**found[step // 2 - 1], "step": step}
        assert prepared.trainer.step == last
        assert resume(tmp_path / name, None, print).settings == prepared.settings
    asked = job(table, tmp_path / "f1", metrics=["f1"])
    assert start(asked, print).settings.metric == "f1"
    asked = job(table, tmp_path / "without dev")
    asked.dev = "0"
    assert start(asked, print).settings.metric == "loss"


def test_a_run_goes_on(table, tmp_path):
    """A resumed run ends with exactly the weights of an uninterrupted one."""
    same = [*SMALL, "train.schedule=constant", "train.eval_steps=10"]
    found = []
    for name, steps in (("whole", 40), ("half", 20)):
        asked = job(table, tmp_path / name)
        asked.overrides = [*same, f"train.steps={steps}"]
        found.append(start(asked, print))
        found[-1].train()
    whole, again = found[0], resume(tmp_path / "half", {"steps": 40}, print)
    again.train()
    assert again.trainer.step == 40
    wanted = whole.model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.model.state_dict().items())
    assert not torch.equal(found[1].model.embed.table, again.model.embed.table)


def test_all_labels_with_their_probability(table, tmp_path):
    made = start(job(table, tmp_path / "run"), print).train()
    (found,) = made.predict(["abc"], made.config.read({"num_return": 2}, made.config))
    assert {one.text for one in found} == {"vowel", "consonant"}
    assert sum(torch.tensor([one.logprob for one in found]).exp()) == pytest.approx(1, abs=1e-5)


def test_a_label_that_cannot_be_learned(table, tmp_path, capsys):
    """A label that only dev or test has is reported, and counts as an error."""
    for part, label in (("dev", "vowels"), ("test", "rare")):
        (tmp_path / f"{part}.tsv").write_text(f"text\tlabel\nabc\t{label}\nbca\tconsonant\n")
    asked = job(table, tmp_path / "run")
    asked.dev, asked.test = str(tmp_path / "dev.tsv"), str(tmp_path / "test.tsv")
    asked.overrides = [*SMALL, "train.steps=2"]
    prepared = start(asked, print)
    assert "the label 'vowels' cannot be learned" in capsys.readouterr().out
    assert prepared.model.head.classes == 4
    run = prepared.train()
    assert prepared.trainer.metrics["accuracy"] <= 50
    assert evaluate(run, prepared.corpus.test, ["loss", "accuracy"])["scores"]["accuracy"] <= 50


def test_a_label_that_was_not_learned_is_an_error_of_the_model(table, tmp_path):
    asked = job(table, tmp_path / "run")
    asked.overrides = [*SMALL, "train.steps=2"]
    run = start(asked, print).train()
    known = [("abc", "vowel"), ("bca", "consonant"), ("eda", "vowel")]
    rows = [*known, ("nab", "rare"), ("cab", "<pad>")]
    told, other = evaluate(run, rows, ["loss", "accuracy", "f1"]), evaluate(run, known, ["loss", "accuracy"])
    assert told["scores"]["accuracy"] == pytest.approx(other["scores"]["accuracy"] * 3 / 5)
    assert told["scores"]["loss"] == pytest.approx(other["scores"]["loss"])
    assert told["counts"] | {"examples": 5, "tokens": 3, "not_learned": 2, "left_out": 0} == told["counts"]
    (note,) = told["notes"]
    assert note.startswith("2 examples have labels that were not learned, such as 'rare'")
    assert other["notes"] == []
    with pytest.raises(UserError, match=r"none of the labels of this data .'eda', 'nab'. .*--columns"):
        evaluate(run, [("vowel", "eda"), ("vowel", "nab")], ["accuracy"])


def test_one_label_is_none(tmp_path):
    (tmp_path / "words.tsv").write_text("".join(f"{i}\tyes\n" for i in range(500)))
    with pytest.raises(UserError, match="at least two"):
        start(job(tmp_path / "words.tsv", tmp_path / "run"), print)


def refused(tmp_path, lines, **more):
    path = tmp_path / "table.tsv"
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    with pytest.raises(UserError) as caught:
        start(job(path, tmp_path / "run", **more), print)
    assert not (tmp_path / "run").exists()
    return str(caught.value)


def started(tmp_path, lines, **more):
    path = tmp_path / "table.tsv"
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    return start(job(path, tmp_path / "run", **more), print)


LINES = [(f"text number {number}", "good" if number % 2 else "bad") for number in range(200)]


@pytest.mark.parametrize("first", [("Kritik", "Urteil"), ("phrase", "Sentiment"), ("x1", "y")])
def test_a_header_among_the_examples_is_asked_about(tmp_path, first):
    """The header is found whichever split its line falls into."""
    told = refused(tmp_path, [first, *LINES])
    assert f"'{first[1]}'" in told
    assert f"'{first[0]}'" in told
    assert "--header yes" in told
    assert "--header no" in told
    assert started(tmp_path, [first, *LINES], header="yes").model.head.classes == 2


def test_a_rare_label_may_stand_in_the_first_line(tmp_path):
    assert started(tmp_path, [("phrase", "odd"), *LINES], header="no").model.head.classes == 3


def test_rare_labels_elsewhere_are_labels(tmp_path):
    assert started(tmp_path, [*LINES, ("phrase", "odd")]).model.head.classes == 3


def test_as_many_labels_as_texts_are_asked_about(tmp_path):
    """About as many labels as examples: the columns are swapped, or it is not classification."""
    assert "--columns 1,0" in refused(tmp_path, [(label, text) for text, label in LINES])
    told = refused(tmp_path, [(f"topic {number % 29}", text) for number, (text, _) in enumerate(LINES)])
    assert "different labels" in told
    assert "'text number " in told
    assert "--columns 1,0" in told
    kept = [(f"t{number}", f"l{number}") for number in range(150)]
    assert "--columns 0,1" in refused(tmp_path, kept)
    assert started(tmp_path, kept, columns="0,1").model.head.classes == 150


def test_columns_that_were_named_the_wrong_way_round_are_refused(tmp_path):
    turned = [(f"topic {number % 29}", text) for number, (text, _) in enumerate(LINES)]
    told = refused(tmp_path, turned, columns="0,1")
    assert "--columns 1,0" in told
    assert "different labels" in told
    assert started(tmp_path, turned, columns="1,0").model.head.classes == 29


def test_many_labels_that_were_asked_for_are_told_of(tmp_path, capsys):
    started(tmp_path, [(f"t{number}", f"l{number}") for number in range(150)], columns="0,1")
    assert "warning: there are" in capsys.readouterr().out


def test_a_few_texts_may_have_a_label_each(tmp_path):
    path = tmp_path / "few.tsv"
    path.write_text("".join(f"text {number}\tlabel {number}\n" for number in range(5)))
    given = {"tokenizer": "characters", "dev": "0", "test": "0"}
    assert start(
        Job("transformer-encoder", str(tmp_path / "run"), "tiny", SMALL, str(path), **given, as_published=True), print
    )


@pytest.mark.parametrize("name", ["bleu", "perplexity", "pearson"])
def test_a_metric_that_means_nothing_is_refused_with_those_that_do(table, tmp_path, name):
    with pytest.raises(UserError, match=f"'{name}' means nothing for this model: those that do are loss, accuracy, f1"):
        start(job(table, tmp_path / "run", metrics=[name]), print)
    assert not (tmp_path / "run").exists()


def test_batches_hold_each_text_beside_its_label():
    labels = Tokenizer.from_labels(["new york", "paris", " paris "])
    assert labels.num_labels == 2
    assert labels.tokens([FIRST_LABEL, FIRST_LABEL + 1]) == ["new york", "paris"]
    assert labels.encode(["paris ", "rome"]) == [[FIRST_LABEL + 1], [labels.unk]]

    class Rows:
        lengths = torch.tensor([[2, 2], [5, 2], [2, 2]]).numpy()

        def __getitem__(self, index):
            return [7, 9, 8][index] * torch.ones(self.lengths[index][0]).long().numpy(), [FIRST_LABEL + index, 3]

    batches = LabeledBatches(Rows(), 100, 1)
    (numbers,) = batches.epoch(0)
    batch = batches.make(numbers)
    assert batch.tokens.shape == (3, 5)
    assert batch.count == 3
    for row, label in zip(batch.tokens, batch.targets, strict=True):
        assert int(row[0]) == [7, 9, 8][int(label)]
    assert batch.valid.sum(1).tolist() == [2, 2, 5]


def test_f1_is_the_mean_over_labels():
    answers, right = ["a", "a", "b", "c"], [["a"], ["b"], ["b"], ["a"]]
    values = [score.value for score in measure(["accuracy", "f1"], answers, right)]
    assert values == pytest.approx([50, 100 * (1 / 2 + 2 / 3 + 0) / 3])
