"""Classifying and rating pairs of texts: from a table to a trained run."""

import random

import numpy as np
import pytest
import torch

import regard
from regard.core import UserError
from regard.data import Tokenizer, open_corpus
from regard.data.matched import MatchBatches, MatchCoder, decode_labels, decode_numbers
from regard.evaluate import evaluate
from regard.metrics import measure
from regard.runs.job import Job
from regard.train.job import resume, start

SMALL = [
    "model.width=16", "model.heads=2", "model.depth=1", "model.dropout=0", "model.layer.0.feedforward.hidden=24",
    "model.head.dropout=0", "train.batch_tokens=512", "train.lr=0.01", "train.warmup=5", "train.steps=150",
    "model.embed={part='segments', position='sinusoidal', types=2}",
]  # fmt: skip


def quiet(sentence):
    """Ignore a message."""


def rows(count=400):
    """Write pairs of words with a label, whether the second has an a, or with the number of a's."""
    rng = random.Random(5)
    made = []
    for _ in range(count):
        one, two = ("".join(rng.choices("abcd", k=rng.randint(2, 5))) for _ in range(2))
        made.append((one, two, "with" if "a" in two else "without", f"{1.5 * two.count('a') - 0.25:.2f}"))
    return made


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    place = tmp_path_factory.mktemp("pairs")
    for name, column in (("labels", 2), ("numbers", 3)):
        lines = ["a\tb\t" + ("label" if column == 2 else "score")]
        lines += ["\t".join((row[0], row[1], row[column])) for row in rows()]
        (place / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return place


def job(table, run, overrides=(), **more):
    given = {"tokenizer": "characters", "dev": "60", "test": "60", "task": "match"} | more
    return Job("transformer-encoder", str(run), "tiny", [*SMALL, *overrides], str(table), **given, as_published=True)


def test_learns_labels(tables, tmp_path):
    prepared = start(job(tables / "labels.tsv", tmp_path / "run", metrics=["accuracy"]), quiet)
    made = prepared.train()
    assert prepared.trainer.metrics["accuracy"] > 90
    loaded = regard.load(tmp_path / "run")
    asked = [("bc", "ad"), ("aabc", "cb"), ("ba", "bdca")]
    for run in (made, loaded):
        answers = run.predict(asked)
        assert [best[0].text for best in answers] == ["with", "without", "with"]
    lines = ["\t".join(pair) for pair in asked]
    assert [best[0].score for best in loaded.predict(lines)] == [best[0].score for best in answers]
    alone = [loaded.predict([pair])[0][0].score for pair in asked]
    assert alone == pytest.approx([best[0].score for best in answers], abs=1e-4)
    found = evaluate(loaded, prepared.corpus.test, loaded.metrics)["scores"]
    assert found["accuracy"] > 85
    assert found["loss"] < 0.5
    (both,) = loaded.predict(asked[:1], loaded.config.read({"num_return": 2}, loaded.config))
    assert sum(torch.tensor([one.logprob for one in both]).exp()) == pytest.approx(1, abs=1e-5)


def test_learns_numbers(tables, tmp_path):
    """Answers that are not integers are rated without being asked; the bias begins at their mean."""
    prepared = start(job(tables / "numbers.tsv", tmp_path / "run", ["train.steps=120"], metrics=[]), quiet)
    values = [float(row[2]) for row in prepared.corpus.train]
    assert prepared.model.head.out.bias.item() == pytest.approx(sum(values) / len(values), abs=1e-4)
    made = prepared.train()
    assert prepared.settings.metric == "spearman"
    assert prepared.trainer.metrics["spearman"] > 60
    loaded = regard.load(tmp_path / "run")
    assert loaded.metrics == ("loss", "pearson", "spearman")
    asked = [("bb", "aca"), ("aa", "cd")]
    one, two = (float(best[0].text) for best in loaded.predict(asked))
    assert one > two + 1
    assert [best[0].score for best in made.predict(asked)] == [best[0].score for best in loaded.predict(asked)]
    told = evaluate(loaded, prepared.corpus.test, loaded.metrics)["scores"]
    answers = loaded.predict([row[:2] for row in prepared.corpus.test])
    missing = [best[0].score - float(row[2]) for best, row in zip(answers, prepared.corpus.test, strict=True)]
    assert told["loss"] == pytest.approx(np.mean(np.square(missing)), rel=1e-3)
    assert resume(tmp_path / "run", {"steps": 122}, quiet).train()


def test_whole_numbers_are_labels_unless_numbers_are_asked_for(tmp_path):
    table = tmp_path / "pairs.tsv"
    table.write_text("".join(f"{a}\t{b}\t{len(b) // 2}\n" for a, b, *_ in rows(150)))
    small = ["train.steps=2"]
    one = start(job(table, tmp_path / "one", small), quiet)
    assert one.model.head.classes == len({line[-1] for line in table.read_text().splitlines()})
    two = start(job(table, tmp_path / "two", [*small, "train.metric=pearson"], metrics=["pearson"]), quiet)
    assert two.model.head.outputs == 1
    assert (one.settings.metric, two.settings.metric) == ("accuracy", "pearson")
    assert "pearson" in two.train().metrics


def alike(path, numbers):
    """Write pairs of sentences, and the share of words that they have in common or whether that is much."""
    rng = random.Random(7)
    words = [a + b + c for a in "bdfkmt" for b in "aeiou" for c in "lnrs"]
    lines = []
    for _ in range(600):
        one, other = rng.sample(words, 8), rng.sample(words, 8)
        kept = rng.randint(0, 8)
        two = [*one[:kept], *other[kept:]]
        rng.shuffle(two)
        lines.append(f"{' '.join(one)}\t{' '.join(two)}\t{kept / 2 if numbers else 'near' if kept > 4 else 'far'}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(("numbers", "metric", "least"), [(True, "spearman", 85), (False, "accuracy", 85)])
def test_words_in_common_are_learned_from_few_pairs(tmp_path, numbers, metric, least):
    data = alike(tmp_path / "pairs.tsv", numbers)
    given = {"data": str(data), "dev": "100", "header": "no"}
    prepared = start(Job("word-averaging", str(tmp_path / "run"), **given), quiet)
    prepared.train()
    assert prepared.trainer.metrics[metric] > least
    assert prepared.trainer.step <= 330
    loaded = regard.load(tmp_path / "run")
    near, far = (best[0] for best in loaded.predict([("bal fen kis", "kis bal fen"), ("bal fen kis", "tol mur das")]))
    assert near.score > far.score if numbers else (near.text, far.text) == ("near", "far")
    again = Job("", str(tmp_path / "again"), overrides=["train.steps=2"], origin=str(tmp_path / "run"), **given)
    again.task = "match"
    assert start(again, quiet).recipe["model"]["head"] == prepared.recipe["model"]["head"]


def of_numbers(tmp_path, values, first="", **more):
    path = tmp_path / "pairs.tsv"
    path.write_text(first + "".join(f"{a}\t{b}\t{next(values)}\n" for a, b, *_ in rows(200)))
    return start(job(path, tmp_path / "run", ["train.steps=2"], **more), quiet)


def test_many_different_numbers_are_learned_as_numbers(tmp_path):
    said = []
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\t{number % 21}\n" for number, (a, b, *_) in enumerate(rows(200))))
    prepared = start(job(path, tmp_path / "run", ["train.steps=2"]), said.append)
    assert prepared.model.head.outputs == 1
    assert any("21 different numbers" in one and "--metric accuracy" in one for one in said)
    other = start(job(path, tmp_path / "labels", ["train.steps=2"], metrics=["accuracy"]), quiet)
    assert other.model.head.classes == 21


def test_few_whole_numbers_are_labels(tmp_path):
    assert of_numbers(tmp_path, (number % 3 for number in range(200))).model.head.classes == 3


def test_a_header_above_numbers_is_asked_about(tmp_path):
    with pytest.raises(UserError, match=r"'closeness'.*--header yes.*--header no"):
        of_numbers(tmp_path, (number / 40 for number in range(200)), "links\trechts\tcloseness\n")
    prepared = of_numbers(tmp_path, (number / 40 for number in range(200)), "links\trechts\tcloseness\n", header="yes")
    assert prepared.model.head.outputs == 1


def test_from_another_run(tables, tmp_path):
    """Fine-tuning on numbers keeps the head without --task, and replaces it with one."""
    small = ["train.steps=3"]
    start(job(tables / "numbers.tsv", tmp_path / "base", small), quiet).train()
    base = regard.load(tmp_path / "base").model.state_dict()
    given = {"dev": "60", "test": "0", "origin": str(tmp_path / "base")}
    on = start(
        Job("", str(tmp_path / "on"), None, small, str(tables / "numbers.tsv"), **given, as_published=True), quiet
    )
    assert all(torch.equal(tensor, base[name]) for name, tensor in on.model.state_dict().items())
    on.train()
    new = start(
        Job(
            "", str(tmp_path / "new"), None, small, str(tables / "labels.tsv"), task="match", **given, as_published=True
        ),
        quiet,
    )
    assert new.model.head.classes == 2
    assert torch.equal(new.model.embed.table, base["embed.table"])
    new.train()
    assert regard.load(tmp_path / "new").predict([("ab", "b")])[0][0].text in ("with", "without")
    with pytest.raises(UserError, match=r"numbers are wanted here, and 'with(out)?' is none"):
        start(
            Job("", str(tmp_path / "bad"), None, small, str(tables / "labels.tsv"), **given, as_published=True), quiet
        )


def words():
    return Tokenizer.train("words", ["a b c d e f g h"])


def test_two_texts_become_one():
    """Pairs get the special tokens of the tokenizer; else each text ends in the end token."""
    plain = words()
    a, b, c = (plain.encode([letter])[0][0] for letter in "abc")
    ((ids, segments),) = MatchCoder(plain, None, None).encode_pairs([("a b", "c")])
    assert ids == [a, b, plain.end, c, plain.end]
    assert segments == [0, 0, 0, 1, 1]
    ((_, clipped),) = MatchCoder(plain, None, 1).encode_pairs([("a b", "c")])
    assert clipped == [0] * 5
    ids, answers, segments = MatchCoder(plain, None, 2)([("a", "b c", "1.25"), ("c", "c", "-3")])
    assert [len(row) for row in ids] == [len(row) for row in segments] == [5, 4]
    assert decode_numbers(answers).tolist() == [1.25, -3]
    labels = Tokenizer.from_labels(["yes", "no"])
    _, answers, _ = MatchCoder(plain, labels, 2)([("a", "b c", " yes "), ("c", "c", "no")])
    assert decode_labels(answers).tolist() == [1, 0]
    with pytest.raises(UserError, match="the label 'noo' is none of those that were learned; did you mean 'no'"):
        MatchCoder(plain, labels, 2)([("a", "b", "noo")])
    with pytest.raises(UserError, match="'much' is no number"):
        MatchCoder(plain, None, 2)([("a", "b", "much")])


def marked():
    from tokenizers.processors import TemplateProcessing

    made = words()
    special = [("<s>", made.start), ("</s>", made.end)]
    made.inner.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=special
    )
    return Tokenizer(made.inner)


@pytest.mark.parametrize("tokenizer", [words, marked])
@pytest.mark.parametrize("limit", range(4, 14))
def test_the_longer_text_is_cut_first(tokenizer, limit):
    made = tokenizer()
    coder = MatchCoder(made, None, 2)
    marks = len(coder.encode_pairs([("", "")])[0][0])
    for one, two in (("a b c d e f g", "h a"), ("h a", "a b c d e f g"), ("a b c d e f", "c d e f g h")):
        ((ids, segments),) = coder.encode_pairs([(one, two)], limit)
        whole, _ = coder.encode_pairs([(one, two)])[0]
        assert len(ids) == len(segments) == min(limit, len(whole))
        assert ids[-1] == made.end
        counts = [segments.count(0) - (marks - 1), segments.count(1) - 1]
        left = limit - marks
        lengths = [len(text.split()) for text in (one, two)]
        if sum(lengths) > left:
            assert sum(counts) == left
            assert all(count >= min(length, left // 2) for count, length in zip(counts, lengths, strict=True))


def test_batches_hold_each_pair_beside_its_answer():
    class Rows:
        rows = [([7, 8, 9], [1], [0, 0, 1]), ([5, 6, 7, 8, 9], [0], [0, 1, 1, 1, 1]), ([4, 4], [2], [0, 1])]
        lengths = np.array([[len(side) for side in row] for row in rows])

        def __getitem__(self, index):
            return tuple(map(np.array, self.rows[index]))

    batches = MatchBatches(Rows(), 100, 1, decode_labels, pad=3)
    (numbers,) = batches.epoch(0)
    batch = batches.make(numbers)
    assert batch.count == 3
    for place, number in enumerate(numbers):
        ids, label, segments = Rows.rows[number]
        assert batch.tokens[place].tolist() == ids + [3] * (5 - len(ids))
        assert batch.segments[place].tolist() == segments + [0] * (5 - len(ids))
        assert batch.targets[place] == label[0]
        assert int(batch.valid[place].sum()) == len(ids)


def test_segments_reach_the_model(tables, tmp_path):
    """The order of the texts matters, although the tokens are the same."""
    run = start(job(tables / "labels.tsv", tmp_path / "run", ["train.steps=2"]), quiet).train()
    with torch.no_grad():
        run.model.embed.segment_table[1] += 3.0
    before = run.predict([("ab", "cd")])[0][0].score
    run.coder.types = 1
    assert run.predict([("ab", "cd")])[0][0].score != pytest.approx(before, abs=1e-3)


def test_correlations():
    answers, right = ["1", "2.5", "2.5", "9"], [["10"], ["20"], ["30"], ["40"]]
    pearson, spearman = (score.value for score in measure(["pearson", "spearman"], answers, right))
    x, y = np.array([1, 2.5, 2.5, 9]), np.array([10, 20, 30, 40])
    assert pearson == pytest.approx(100 * np.corrcoef(x, y)[0, 1])
    assert spearman == pytest.approx(100 * np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3, 4])[0, 1])
    assert measure(["pearson"], ["2", "2"], [["1"], ["3"]])[0].value == 0
    with pytest.raises(UserError, match="a correlation is of numbers"):
        measure(["pearson"], ["two"], [["1"]])


REFUSED = [
    ({"metrics": ["pearson"]}, "labels", "numbers are wanted here, and"),
    ({"metrics": ["span_f1"]}, "labels", "'span_f1' means nothing for this model"),
    ({"metrics": ["perplexity"]}, "numbers", "'perplexity' means nothing for this model"),
    ({"columns": "0,1"}, "labels", "3 columns are wanted, and 2 were named"),
    ({"data": "one,two"}, "labels", "are pairs, and a table with two texts and a label is wanted"),
]


@pytest.mark.parametrize(("given", "table", "sentence"), REFUSED, ids=[sentence for *_, sentence in REFUSED])
def test_refused(tables, tmp_path, monkeypatch, given, table, sentence):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).write_text("some\ntexts\n")
    asked = job(tables / f"{table}.tsv", tmp_path / "run", ["train.steps=2"])
    for name, value in given.items():
        setattr(asked, name, value)
    with pytest.raises(UserError, match=sentence):
        start(asked, quiet)


def test_columns_have_usual_names(tmp_path):
    (tmp_path / "pairs.csv").write_text("id,sentence2,score,sentence1\n7,two,1.5,one\n")
    assert list(open_corpus(tmp_path / "pairs.csv", dev=0, test=0, kind="matches").train) == [("one", "two", "1.5")]
    (tmp_path / "pairs.jsonl").write_text('{"premise": "one", "hypothesis": "two", "label": 2}\n')
    assert list(open_corpus(tmp_path / "pairs.jsonl", dev=0, test=0, kind="matches").train) == [("one", "two", "2")]
    (tmp_path / "pairs.tsv").write_text("x\ty\n")
    with pytest.raises(UserError, match="two texts and a label are wanted, and there are 2 columns"):
        open_corpus(tmp_path / "pairs.tsv", dev=0, test=0, kind="matches")
