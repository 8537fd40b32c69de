"""Span corruption: which spans are cut out, learning, and filling them in."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

import regard
from regard import UserError
from regard.data import IGNORE, ResumableBatches, Tokenizer
from regard.evaluate import evaluate
from regard.files import recipe as recipes
from regard.parts.objectives.span_corruption import (
    CorruptedWindows,
    Corrupter,
    SpanNoise,
    add_sentinels,
    corrupt,
    corrupted_batches,
    sentinel_ids,
)
from regard.tasks.run import EncodedInput
from regard.tasks.spans import SpanFiller
from regard.train.job import resume, start

TEXT = "the cat sat on the mat, and the rat ran to the cat; " * 60
SMALL = ["model.width=12", "model.heads=2", "model.dropout=0.1", "train.lr=0.02", "train.warmup=1"]
SMALL += [f"model.{side}.depth=1" for side in ("encoder", "decoder")]
SMALL += [f"model.{side}.layer.0.feedforward.hidden=16" for side in ("encoder", "decoder")]
SMALL += [f"model.{side}.dim=5" for side in ("encoder.layer.0.mixer", "decoder.layer.0.mixer", "decoder.layer.0.cross")]
LEARN = [
    "train.steps=40",
    "train.context_length=20",
    "train.batch_size=6",
    "train.eval_steps=20",
    "objective.sentinels=4",
]


def quiet(sentence):
    pass


@pytest.fixture(scope="module")
def tokenizer():
    return add_sentinels(Tokenizer.train("bpe", [TEXT], 300), 9)


@pytest.fixture
def spans(job, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(TEXT[i : i + 90] for i in range(0, len(TEXT), 90)))

    def make(*overrides, recipe="t5", run="run"):
        asked = job(run)
        asked.recipe, asked.data, asked.tokenizer = recipe, str(tmp_path / "text.txt"), None
        asked.overrides = [*SMALL, *LEARN, *overrides]
        return asked

    return make


@pytest.mark.parametrize("length", [2, 3, 7, 20, 101, 512])
def test_how_much_is_cut_out(length):
    """Counts are those of the original: rounded, at least one; kept and cut spans alternate, kept first."""
    gone, spans = SpanNoise().counts(length)
    assert gone == max(round(0.15 * length), 1)
    assert spans == max(round(gone / 3), 1)
    mask = SpanNoise().mask(length, np.random.default_rng(1))
    assert mask.shape == (length,)
    assert mask.sum() == gone
    assert not mask[0]
    assert mask[-1]
    assert (np.diff(mask.astype(int)) == 1).sum() == spans


def test_every_way_to_cut_is_as_likely():
    """Of 9 tokens, 5 are cut in 2 spans: 3 ways to divide the kept ones, 4 to divide the cut ones."""
    noise, rng = SpanNoise(share=0.55, span=2.5), np.random.default_rng(0)
    found = Counter(tuple(noise.mask(9, rng)) for _ in range(3600))
    assert len(found) == 12
    assert max(found.values()) < 1.3 * 300
    assert min(found.values()) > 0.7 * 300


def test_source_and_target_by_hand():
    ids, gone = np.array([5, 6, 7, 8, 9, 10]), np.array([False, True, True, False, False, True])
    source, target = corrupt(ids, gone, np.array([90, 91, 92]), 3)
    assert source.tolist() == [5, 90, 8, 9, 91, 3]
    assert target.tolist() == [90, 6, 7, 91, 10, 3]


def test_nothing_is_lost():
    """Replacing the sentinels of the source by the spans of the target restores the text."""
    rng, sentinels = np.random.default_rng(2), np.arange(200, 300)
    for length in (2, 9, 64, 333):
        ids = rng.integers(4, 200, length)
        source, target = corrupt(ids, SpanNoise(share=0.4).mask(length, rng), sentinels, 3)
        said = {}
        for token in target[:-1].tolist():
            said.setdefault(token, []) if token >= 200 else list(said.values())[-1].append(token)
        assert [t for token in source[:-1].tolist() for t in said.get(token, [token])] == ids.tolist()
        assert list(said) == sentinels[: len(said)].tolist()


def test_the_tokenizer_gets_sentinels(tokenizer):
    numbers = sentinel_ids(tokenizer)
    assert len(numbers) == 9
    assert tokenizer.size == numbers.max() + 1
    assert add_sentinels(tokenizer, 30) is tokenizer
    assert numbers[0] not in tokenizer.encode(["the <extra_id_0> sat"])[0], (
        "in a text that is no question, it is a text"
    )


def test_epochs_differ_and_come_back(tokenizer):
    stream = np.array(tokenizer.encode([TEXT])[0], np.int32)

    def batches(epoch, index):
        feed = ResumableBatches(CorruptedWindows(stream, 20, 3, 1, Corrupter(SpanNoise(), tokenizer, 20)), epoch, index)
        return [next(feed) for _ in range(3)]

    one, again, next_epoch = batches(0, 2), batches(0, 2), batches(1, 2)
    for batch, same, other in zip(one, again, next_epoch, strict=True):
        assert torch.equal(batch.source, same.source)
        assert torch.equal(batch.targets, same.targets)
        assert not torch.equal(batch.source, other.source)
        assert (batch.valid, batch.source_valid) == (None, None), "windows are all of one length"
        assert batch.tokens[:, 0].tolist() == [tokenizer.start] * 3
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        assert batch.count == batch.targets.numel()


def test_a_place_is_cut_otherwise_in_another_epoch(tokenizer):
    stream = np.array(tokenizer.encode([TEXT])[0], np.int32)
    batches = CorruptedWindows(stream, 60, 3, 1, Corrupter(SpanNoise(), tokenizer, 60))
    one, other, elsewhere = (batches.make(np.array([row])).source for row in ([0, 60], [1, 60], [0, 61]))
    assert not torch.equal(one, other)
    assert not torch.equal(one, elsewhere)


@pytest.mark.parametrize(("length", "count"), [(20, 1), (43, 3), (41, 2), (2, 1)])
def test_the_dev_set_is_asked_whole(tokenizer, length, count):
    """The last window may be shorter, and a single last token is left out."""
    text = np.array(tokenizer.encode([TEXT])[0][:length], np.int32)
    corrupter = Corrupter(SpanNoise(), tokenizer, 20)
    batches = list(corrupted_batches(text, 20, 2, corrupter))
    rows = [row for batch in batches for row in batch.targets]
    assert len(rows) == count
    asked = sum(batch.count for batch in batches)
    assert asked == sum(int((row != IGNORE).sum()) for row in rows)
    for batch, again in zip(batches, corrupted_batches(text, 20, 2, corrupter), strict=True):
        assert torch.equal(batch.source, again.source)


@pytest.mark.parametrize("recipe", ["t5", "t5-v11"])
def test_it_learns(spans, tmp_path, recipe):
    prepared = start(spans(recipe=recipe), quiet)
    run = prepared.train()
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["dev"]["loss"] for line in told if "dev" in line]
    assert len(found) == 2
    assert found[1] < found[0] < 0.95 * np.log(prepared.task.target.size)
    loaded = regard.load(tmp_path / "run")
    assert isinstance(loaded, SpanFiller)
    question = "the cat <extra_id_0> the mat, and <extra_id_1> ran"
    answer = loaded.predict([question, "the cat"])
    assert "extra_id" not in answer[0][0].text
    assert answer[0][0].text.startswith("the cat")
    assert answer[0][0].text == run.predict([question])[0][0].text == "".join(loaded.stream(question))
    lines = prepared.corpus.dev
    assert (loaded.reads, loaded.metrics) == ("text", ["loss", "perplexity"])
    assert evaluate(loaded, lines, ["loss"])["scores"]["loss"] == pytest.approx(found[1], rel=1e-4)
    with pytest.raises(UserError, match="bleu"):
        evaluate(loaded, lines, ["bleu"])


def test_it_begins_as_the_original_does():
    """Vectors of size 1, and queries that are smaller by the root of a head's channels, for there is no scale."""
    torch.manual_seed(0)
    model = regard.build("t5", "tiny", vocab=999)
    assert float(model.embed.table.detach().std()) == pytest.approx(1, abs=0.02)
    mixer = model.stack.layers[1].branches["mixer"]
    assert float((mixer.q.weight.std() / mixer.k.weight.std()).detach()) == pytest.approx(32**-0.5, rel=0.05)


def test_it_goes_on_bit_by_bit(spans, tmp_path):
    def losses(name):
        told = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in told if "lr" in line]

    start(spans(run="whole"), quiet).train()
    start(spans("train.steps=17", run="parts"), quiet).train()
    resume(tmp_path / "parts", {"steps": 40}, quiet).train()
    assert len(losses("whole")) == 40
    assert losses("whole") == losses("parts")


def test_pairs_instead(job, tmp_path):
    asked = job(job={"recipe": "t5", "tokenizer": "characters"})
    asked.overrides = [*SMALL, "objective.part=next_token", "train.steps=4", "train.batch_tokens=80"]
    run = start(asked, quiet).train()
    assert type(run) is regard.tasks.run.Run
    assert isinstance(run.predict(["abc"])[0][0].text, str)


def test_what_was_said_is_filled_in(tokenizer):
    recipe = recipes.load("t5", "tiny", [*SMALL, "model.heads=1"])
    run = SpanFiller(regard.build(recipe, vocab=tokenizer.size), tokenizer, tokenizer)
    (one,) = run.encode_inputs(["the cat <extra_id_0> the mat, <extra_id_1> the rat"], run.config)
    zero, first, *_ = sentinel_ids(tokenizer).tolist()
    assert {zero, first} < set(one.ids)
    assert one.ids[-1] == tokenizer.end

    def ids(text):
        return tokenizer.encode([text])[0]

    said = [zero, *ids(" sat on"), first, *ids(" and")]
    assert run._text(one, said) == "the cat sat on the mat, and the rat"
    assert run._text(one, [first, *ids(" or")]) == "the cat the mat, or the rat"
    assert run._text(EncodedInput(ids("the cat")), ids("the mat")) == "the mat"
    assert tokenizer.end not in run.encode_inputs(["the </s> cat"], run.config)[0].ids[:-1], (
        "only where something is to be filled"
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["objective.share=1.5"], "objective.share must be between 0 and 1"),
        (["objective.span=0.5"], "objective.span must be at least 1"),
        (["objective.spam=3"], "no 'spam'"),
        (["train.context_length=200"], "10 removed spans, and the tokenizer only 4 sentinels"),
        (["train.context_length=1"], "train.context_length must be at least 2"),
        (["train.metric=bleu"], "'bleu' means nothing for this model"),
        (["model.embed.position={ part = 'learned', length = 8 }"], "a source of 19 tokens, and the positions"),
    ],
)
def test_refused(spans, tmp_path, overrides, told):
    with pytest.raises(UserError, match=told):
        start(spans(*overrides), quiet)
    assert not (tmp_path / "run" / "run.json").exists()
