"""Evaluating a run: teacher forcing against step-by-step decoding, answers against references."""

import json
import math

import pytest
import torch

import regard
from regard.core import UserError
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.evaluate import evaluate
from regard.tasks.dev import group_references
from regard.tasks.run import Run

ROWS = [("one two", "two one"), ("three", "three"), ("one", "uno"), ("one", "one"), ("two three one", "one three two")]
TEXT = [("one two three\n",), ("two\n",), ("three three one two one two\n",)]


def make(name: str, tokenizer: Tokenizer, *overrides: str, documents: bool = True) -> Run:
    torch.manual_seed(1)
    model = regard.build(name, size="tiny", vocab=tokenizer.size, overrides=["model.depth=1", *overrides]).double()
    return Run(model, tokenizer, tokenizer, documents=documents)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.train("words", [text for row in ROWS for text in row])


@pytest.fixture(scope="module")
def run(words) -> Run:
    return make("transformer", words)


def plain_loss(run: Run, source: str, target: str) -> list[float]:
    """Return -log p of each token of one target and its end, with one call per pair."""
    read = torch.tensor([[*run.source.encode([source])[0], run.source.end]])
    right = [*run.target.encode([target])[0], run.target.end]
    with torch.no_grad():
        logs = run.model(torch.tensor([[run.target.start, *right[:-1]]]), source=read)[0].log_softmax(-1)
    return (-logs[range(len(right)), right]).tolist()


def test_loss_of_pairs(run):
    told = evaluate(run, ROWS, ["loss", "perplexity"])
    each = [value for row in ROWS for value in plain_loss(run, *row)]
    assert told["scores"]["loss"] == pytest.approx(sum(each) / len(each))
    assert told["scores"]["perplexity"] == pytest.approx(math.exp(sum(each) / len(each)))
    assert told["counts"] == {"examples": 5, "tokens": len(each), "left_out": 0}
    assert "config" not in told


@pytest.mark.parametrize("documents", [True, False])
def test_loss_of_a_text(documents):
    """Every token is a target once, in windows that overlap by half."""
    letters = Tokenizer.train("characters", [text for (text,) in TEXT])
    run = make("transformer-decoder", letters, "train.context_length=7", documents=documents)
    told = evaluate(run, TEXT, ["perplexity", "loss"])
    mark = [letters.end] if documents else []
    stream = [i for (text,) in TEXT for i in (*letters.encode([text])[0], *mark)]
    stream = [letters.end if documents else letters.encode(["\n"])[0][0], *stream]
    each = []
    for begin in range(0, len(stream) - 4, 4):
        window = stream[begin : begin + 8]
        with torch.no_grad():
            logs = run.model(torch.tensor([window[:-1]]))[0].log_softmax(-1)
        each += (-logs[range(len(window) - 1), window[1:]]).tolist()[3 if begin else 0 :]
    assert told["counts"]["tokens"] == len(each) == len(stream) - 1
    assert told["scores"]["loss"] == pytest.approx(sum(each) / len(each))


@pytest.mark.parametrize("kind", ["characters", "bytes", "bpe"])
def test_bits_per_character(kind):
    """The whole negative log-likelihood, in bits, over the characters of the raw text, however it is tokenized."""
    rows = [("Über 我 and more\n",), ("\n",), ("naïve café\n",)]
    tokens = Tokenizer.train(kind, [text for (text,) in rows], None if kind != "bpe" else 300)
    run = make("transformer-decoder", tokens, "train.context_length=7", documents=False)
    told = evaluate(run, rows, run.metrics)
    text = "".join(text for (text,) in rows)
    bits = told["scores"]["loss"] * told["counts"]["tokens"] / math.log(2)
    assert told["counts"]["characters"] == len(text)
    assert told["counts"]["bytes"] == len(text.encode())
    assert told["scores"]["bits_per_character"] == pytest.approx(bits / len(text))
    assert told["scores"]["bits_per_byte"] == pytest.approx(bits / len(text.encode()))


LOSSY = {
    "an unknown word": (lambda: Tokenizer.train("words", ["one two three"], 6), "one two three"),
    "lowercase": (lambda: Tokenizer.train("bpe", ["One Two"], 300, lowercase=True), "One Two"),
    "another form": (lambda: Tokenizer.train("bytes", ["x"], normalize="nfkc"), "\uff11\uff12"),
    "an unknown character": (lambda: Tokenizer.train("characters", ["one two"]), "one more"),
    "a gap": (lambda: Tokenizer.train("words", ["one two"]), "one   two"),
}


@pytest.mark.parametrize("case", LOSSY)
def test_no_bits_per_character_of_text_that_the_tokenizer_loses(case):
    """One <unk> costs little, whatever it stands for: its bits over the characters of the text would mean nothing."""
    made, text = LOSSY[case]
    run = make("transformer-decoder", made())
    for name in ("bits_per_character", "bits_per_byte"):
        with pytest.raises(UserError, match=f"'{name}' .* tokenizer of this model loses text") as told:
            evaluate(run, [(text,)], ["loss", name])
        assert repr(text) in str(told.value)
    found = evaluate(run, [(text,)], None)
    assert set(found["scores"]) == {"loss", "perplexity"}
    assert "bits_per_character and bits_per_byte are left out" in found["notes"][0]
    assert found["scores"]["loss"] == evaluate(run, [(text,)], ["loss"])["scores"]["loss"]


def test_bits_per_character_where_the_end_mark_is_the_line_end(words):
    """A tokenizer of words has no token for line ends; the end token replaces them, so nothing is lost."""
    told = evaluate(make("transformer-decoder", words, documents=False), TEXT, None)
    assert set(told["scores"]) == {"loss", "perplexity", "bits_per_character", "bits_per_byte"}
    assert told["notes"] == []


def test_answers_are_compared(run):
    names = ["bleu", "chrf", "ter", "exact", "token_error", "sequence_error", "loss"]
    config = DecodeConfig(beam=2, max_new_tokens=6)
    told = evaluate(run, ROWS, names, config)
    answers = [found[0].text for found in run.predict([source for source, _ in ROWS], config)]
    right = sum(answer == target for answer, (_, target) in zip(answers, ROWS, strict=True))
    assert set(told["scores"]) == set(names)
    assert told["scores"]["exact"] == pytest.approx(100 * right / 5)
    assert set(told["signatures"]) == {"bleu", "chrf", "ter"}
    assert told["counts"]["answers"] == told["counts"]["references"] == 5
    assert told["config"]["beam"] == 2
    assert set(told["seconds"]) == {"loss", "answers"}
    assert json.loads(json.dumps(told)) == told


def test_answers_that_are_right(run, monkeypatch):
    """Evaluate a model that gives one of the two right answers."""
    known = dict(reversed(ROWS))
    monkeypatch.setattr(Run, "_text", lambda self, one, ids: known[self.source.decode(one.ids)])
    strict = evaluate(run, ROWS, ["exact", "token_error"], DecodeConfig(max_new_tokens=2))
    assert strict["scores"] == {"exact": 80.0, "token_error": pytest.approx(100 / 8)}
    kind = evaluate(run, ROWS, ["exact", "token_error"], DecodeConfig(max_new_tokens=2), any_reference=True)
    assert kind["scores"] == {"exact": 100.0, "token_error": 0.0}
    assert (kind["counts"]["answers"], kind["counts"]["references"]) == (4, 5)


def test_case_and_tokenisation_are_passed_on(run, monkeypatch):
    monkeypatch.setattr(Run, "_text", lambda self, one, ids: self.source.decode(one.ids).upper())
    rows = [("one two", "one two"), ("three", "three")]
    assert evaluate(run, rows, ["exact"], DecodeConfig(max_new_tokens=2))["scores"]["exact"] == 0
    told = evaluate(run, rows, ["exact", "bleu"], DecodeConfig(max_new_tokens=2), tokenize="none", lowercase=True)
    assert told["scores"]["exact"] == 100
    assert "tok:none" in told["signatures"]["bleu"]
    assert "case:lc" in told["signatures"]["bleu"]


def test_ticks_count_the_examples(run):
    done: list[int] = []
    evaluate(run, ROWS, ["loss"], tick=done.append)
    assert sum(done) == 5
    evaluate(run, ROWS, ["exact"], DecodeConfig(max_new_tokens=3), any_reference=True, tick=done.append)
    assert sum(done) == 9


def test_examples_beyond_the_positions(words):
    run = make("transformer", words, 'model.embed.position={part="learned", length=3}')
    told = evaluate(run, ROWS, ["loss"])
    assert (told["counts"]["examples"], told["counts"]["left_out"]) == (5, 1)
    with pytest.raises(UserError, match="none of the 1 examples is short enough"):
        evaluate(run, ROWS[-1:], ["loss"])
    with pytest.raises(UserError, match="line 5 has 3 tokens"):
        evaluate(run, ROWS, ["exact"])
    assert evaluate(run, ROWS, ["exact"], DecodeConfig(truncate=True))["counts"]["cut"] == 1


def test_gather():
    assert group_references(ROWS[:2], False) == (["one two", "three"], [["two one"], ["three"]])
    assert group_references(ROWS, False, 3)[0] == ["one two", "three", "one"]
    assert group_references([(str(i), "") for i in range(10)], False, 3)[0] == [
        "0",
        "3",
        "6",
    ]  # not the first ones alone
    sources, references = group_references(ROWS, True)
    assert sources == ["one two", "three", "one", "two three one"]
    assert references[2] == ["uno", "one"]
    sources, references = group_references([*ROWS, ("one", "1")], True, 3)
    assert sources == ["one two", "three", "one"]
    assert references[2] == ["uno", "one", "1"]  # also one that comes after a source too many


def test_what_makes_no_sense_is_refused(run, words):
    writer = make("transformer-decoder", words)
    for subject, rows, names, told in (
        (run, [], ["loss"], "no example"),
        (run, ROWS, ["perplexty"], "did you mean 'perplexity'"),
        (run, TEXT, ["loss"], "wants pairs of source and target"),
        (writer, ROWS, ["loss"], "wants texts, not pairs"),
        (
            writer,
            TEXT,
            ["loss", "bleu"],
            "'bleu' means nothing for this model: those that do are loss, perplexity, bits",
        ),
        (run, ROWS, ["accuracy"], "'accuracy' means nothing for this model: those that do are loss, .* bleu"),
        (run, ROWS, ["bits_per_character"], "'bits_per_character' means nothing for this model"),
    ):
        with pytest.raises(UserError, match=told):
            evaluate(subject, rows, names)
