"""Tagging words: files, the first token of every word, spans, and a trained run."""

import gzip
import json
import random

import numpy as np
import pytest
import torch

import regard
from regard.core import UserError
from regard.data import IGNORE, Tokenizer, open_corpus
from regard.data.conll import TagBatches, TagCoder, first_tokens_of_words, parse_tags
from regard.evaluate import evaluate
from regard.metrics import measure, spans
from regard.runs.job import Job
from regard.train.job import resume, start

SMALL = [
    "model.width=16", "model.heads=2", "model.depth=1", "model.dropout=0", "model.layer.0.feedforward.hidden=24",
    "train.batch_tokens=512", "train.lr=0.01", "train.warmup=5", "train.steps=80",
]  # fmt: skip


def quiet(sentence):
    """Ignore a message."""


def sentences(count=150):
    """Write sentences in which capitalized words are names, of one word or two, and digits are numbers."""
    rng = random.Random(7)
    made = []
    for _ in range(count):
        words: list[tuple[str, str]] = []
        while len(words) < rng.randint(2, 5):
            kind = rng.choice("wwwnd")
            if kind == "n":
                words += [("An", "B-NAME"), ("Bo", "I-NAME")][: rng.randint(1, 2)]
                words.append(("sat", "O"))
            else:
                words.append((rng.choice(("the", "mat", "unseeable")), "O") if kind == "w" else ("377", "B-NUM"))
        made.append(words)
    return made


def conll(path, some):
    path.write_text("\n\n".join("\n".join("\t".join(word) for word in words) for words in some) + "\n")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return conll(tmp_path_factory.mktemp("tags") / "words.conll", sentences())


def job(data, run, overrides=(), **more):
    given = {"tokenizer": "bpe", "vocab": 290, "dev": "20", "test": "20", "task": "tag"} | more
    return Job("transformer-encoder", str(run), "tiny", [*SMALL, *overrides], str(data), **given, as_published=True)


def test_learns_loads_and_tags(data, tmp_path):
    prepared = start(job(data, tmp_path / "run", metrics=["span_f1"]), quiet)
    assert prepared.model.head.classes == 4
    made = prepared.train()
    assert prepared.trainer.metrics["tag_accuracy"] > 95
    assert prepared.trainer.metrics["span_f1"] > 90
    loaded = regard.load(tmp_path / "run")
    asked = ["the An Bo sat", "377", "mat  An sat 377 "]
    for run in (made, loaded):
        answers = [best[0] for best in run.predict(asked)]
        assert [one.text for one in answers] == [
            "the/O An/B-NAME Bo/I-NAME sat/O", "377/B-NUM", "mat/O An/B-NAME sat/O 377/B-NUM"
        ]  # fmt: skip
        assert answers[0].tokens == ["O", "B-NAME", "I-NAME", "O"]
    alone = [loaded.predict([text])[0][0].score for text in asked]
    assert alone == pytest.approx([one.score for one in answers], abs=1e-4)
    told = evaluate(loaded, prepared.corpus.test, loaded.metrics)
    assert told["scores"]["span_f1"] > 90
    assert told["scores"]["loss"] < 0.2
    assert loaded.predict([""])[0][0].text == ""
    assert resume(tmp_path / "run", {"steps": 82}, quiet).train()


def test_from_another_run(data, tmp_path):
    start(job(data, tmp_path / "base", ["train.steps=3"]), quiet).train()
    other = conll(tmp_path / "other.conll", [[(word, "T-" + tag) for word, tag in words] for words in sentences()])
    given = {"dev": "20", "test": "0", "origin": str(tmp_path / "base"), "overrides": ["train.steps=2"]}
    made = start(Job("", str(tmp_path / "new"), data=str(other), task="tag", **given, as_published=True), quiet)
    base = regard.load(tmp_path / "base")
    assert torch.equal(made.model.embed.table, base.model.embed.table)
    assert set(made.task.target.inner.get_vocab()) > {"T-O", "T-B-NUM"}
    made.train()
    with pytest.raises(UserError, match="the label 'T-B-NAME' is not among those of the run"):
        start(Job("", str(tmp_path / "on"), data=str(other), **given, as_published=True), quiet)
    start(Job("", str(tmp_path / "on"), data=str(data), **given, as_published=True), quiet).train()


def test_a_sentence_that_is_too_long(data, tmp_path):
    """The last words of a long sentence are not read, and get the tag '?'."""
    run = start(job(data, tmp_path / "run", ["train.steps=2"]), quiet).train()
    text = "the mat sat An Bo"
    ((ids, firsts),) = first_tokens_of_words(run.source, [text])
    config = run.config.read({"max_source_tokens": firsts[3] + 1, "truncate": True}, run.config)
    (answer,) = run.predict([text], config)[0]
    assert answer.cut
    assert [tag == "?" for tag in answer.tokens] == [False, False, False, True, True]
    with pytest.raises(UserError, match=f"line 2 has {len(ids)} tokens"):
        run.predict(["the", text], run.config.read({"max_source_tokens": len(ids) - 1}, run.config))


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "words", "characters", "bytes", "pretokenised"])
def test_where_words_begin(kind):
    """The first token of a word begins with its first characters, with any tokenizer."""
    words = ["EU", "rejects", "Zürich's", "über-lange", "Wörter", "日本語", "."]
    text = " ".join(words)
    tokenizer = Tokenizer.train(kind, [text, "EU rejects Zürich"] * 3, {"bytes": None}.get(kind, 400))
    ((ids, firsts),) = first_tokens_of_words(tokenizer, [text])
    assert ids == tokenizer.encode_with_special_tokens([text])[0]
    assert firsts == sorted(set(firsts))
    assert len(firsts) == len(words)
    for word, first, after in zip(words, firsts, [*firsts[1:], len(ids) - 1], strict=True):
        said = tokenizer.decode(ids[first:after]).strip()
        assert said == word or tokenizer.unk in ids[first:after] or said.replace(" ", "") == word
    assert first_tokens_of_words(tokenizer, [""])[0][1] == []


def test_where_words_begin_between_marks():
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer.train("characters", ["ab c"])
    marks = [("<s>", made.start), ("</s>", made.end)]
    made.inner.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=marks)
    ((ids, firsts),) = first_tokens_of_words(Tokenizer(made.inner), ["ab c ba"])
    assert ids[0] == made.start
    assert firsts == [1, 4, 6]


def test_of_every_word_the_first_token_is_asked():
    letters = Tokenizer.train("characters", ["abc"])
    tags = Tokenizer.from_labels(["X", "Y", "O"])
    tokens, asked = TagCoder(letters, tags)([("abc b", "X O"), ("c", "Y")])
    assert [len(row) for row in tokens] == [6, 2]  # a space is a token, and there is the end mark
    assert asked == [[1, IGNORE, IGNORE, IGNORE, 0, IGNORE], [2, IGNORE]]
    with pytest.raises(UserError, match="the label 'Z' is none of those that were learned"):
        TagCoder(letters, tags)([("a", "Z")])

    class Rows:
        rows = list(zip(tokens, asked, strict=True))
        lengths = np.array([[6, 6], [2, 2]])

        def __getitem__(self, index):
            return tuple(map(np.array, self.rows[index]))

    batches = TagBatches(Rows(), 100, 1, pad=0)
    batch = batches.make(np.array([1, 0]))
    assert batch.count == 3
    assert batch.targets.tolist() == [[2] + [IGNORE] * 5, asked[0]]
    assert batch.valid.sum(1).tolist() == [2, 6]


FILES = {
    "plain.conll": "-DOCSTART- O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\nBonn NNP B-LOC\n",
    "tabs.tsv": "EU\tB-ORG\nrejects\tO\n\nBonn\tB-LOC\n",
    "words.conllu": (
        "# newdoc = 1\n# text = EU rejects\n1-2\tEUrejects" + "\t_" * 8 + "\n"
        "1\tEU\teu\tB-ORG" + "\t_" * 6 + "\n2\trejects\treject\tO" + "\t_" * 6 + "\n2.1\tx" + "\t_" * 8 + "\n\n"
        "# text = Bonn\n1\tBonn\tBonn\tB-LOC" + "\t_" * 6 + "\n\n"
    ),
    "lists.jsonl": '{"tags": ["B-ORG", "O"], "words": ["EU", "rejects"]}\n{"words": ["Bonn"], "tags": ["B-LOC"]}\n',
    "table.tsv": "news\tEU rejects\tB-ORG O\nnews\tBonn\tB-LOC\nnews\tEU rejects\tB-ORG O\n",
    "table.csv": "words,tags\nEU rejects,B-ORG O\nBonn,B-LOC\n",
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("zipped", [False, True])
def test_files(tmp_path, name, zipped):
    path = tmp_path / (name + ".gz" if zipped else name)
    path.write_bytes(gzip.compress(FILES[name].encode()) if zipped else FILES[name].encode())
    columns = {"words.conllu": "1,3", "table.tsv": "1,2"}.get(name)
    found = list(open_corpus(path, dev=0, test=0, kind="tags", columns=columns).train)
    assert found[:2] == [("EU rejects", "B-ORG O"), ("Bonn", "B-LOC")]
    assert len(found) == (3 if name == "table.tsv" else 2)


def test_universal_columns_are_known(tmp_path):
    """The columns of CoNLL-U are the word and its part of speech."""
    path = tmp_path / "words.conllu"
    path.write_text(FILES["words.conllu"])
    assert next(iter(open_corpus(path, dev=0, test=0, kind="tags").train)) == ("EU rejects", "B-ORG O")


def test_tags_without_spans(tmp_path):
    """For tags without spans, such as parts of speech, the default metrics work."""
    plain = conll(tmp_path / "words.conll", [[(word, tag[:1]) for word, tag in words] for words in sentences()])
    prepared = start(job(plain, tmp_path / "run", ["train.steps=2"]), quiet)
    run = prepared.train()
    assert set(evaluate(run, prepared.corpus.test, run.metrics)["scores"]) == {"loss", "tag_accuracy"}


def test_a_tag_that_dev_alone_has(data, tmp_path):
    heard = []
    dev = conll(tmp_path / "dev.conll", [[("An", "B-NAM"), ("sat", "O")]])
    prepared = start(job(data, tmp_path / "run", ["train.steps=2"], dev=str(dev), test=None), heard.append)
    prepared.train()
    assert [one for one in heard if "the label 'B-NAM' cannot be learned" in one]
    assert prepared.trainer.metrics["tag_accuracy"] <= 50


def test_a_tag_that_was_not_learned_is_an_error_of_the_model(data, tmp_path):
    run = start(job(data, tmp_path / "run", ["train.steps=2"]), quiet).train()
    known = [("the mat An", "O O B-NAME"), ("An Bo", "B-NAME I-NAME")]
    mixed = [("the mat An", "O I-NUM B-NAME"), known[1], ("mat", "I-NUM")]
    told, other = evaluate(run, mixed, None), evaluate(run, known, None)
    assert (told["counts"]["tokens"], other["counts"]["tokens"]) == (4, 5)
    assert (told["counts"]["not_learned"], told["counts"]["left_out"]) == (2, 0)
    right = [best[0].tokens for best in run.predict([words for words, _ in mixed])]
    hits = sum(
        a == b for said, (_, tags) in zip(right, mixed, strict=True) for a, b in zip(said, tags.split(), strict=True)
    )
    assert told["scores"]["tag_accuracy"] == pytest.approx(100 * hits / 6)
    assert told["notes"][0].startswith("2 examples have labels that were not learned, such as 'I-NUM'")
    assert not other["notes"]
    with pytest.raises(UserError, match=r"none of the labels .*--columns"):
        evaluate(run, [("O O", "the mat")], ["tag_accuracy"])


def test_a_folder_of_files(tmp_path):
    for part in ("train", "dev", "test"):
        (tmp_path / f"{part}.conll").write_text(f"{part} X\n\n")
    corpus = open_corpus(tmp_path, kind="tags")
    assert [list(getattr(corpus, part)) for part in ("train", "dev", "test")] == [
        [("train", "X")], [("dev", "X")], [("test", "X")]
    ]  # fmt: skip


BAD = [
    ("a.conll", "EU B-ORG\nrejects\n\nBonn X\n", "a.conll, line 2: a word and its tag are wanted"),
    ("a.conll", "EU\tA/B\n", "line 1: the tag 'A/B' holds a '/'"),
    ("a.conll", "EU\tX\n\nBonn\t\n", "line 3: the word 'Bonn' has the tag ''"),
    ("a.jsonl", '{"words": ["EU", "rejects"], "tags": ["O"]}\n', "line 1: 2 words and 1 tags"),
    ("a.jsonl", '{"words": ["EU", ""], "tags": ["O", "O"]}\n', "line 1: the word '' has the tag 'O'"),
    ("a.jsonl", '{"words": {"a": 1}, "tags": ["O"]}\n', "is not a text but dict"),
]


@pytest.mark.parametrize(("name", "text", "sentence"), BAD, ids=[sentence for *_, sentence in BAD])
def test_bad_files(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=sentence):
        open_corpus(tmp_path / name, dev=0, test=0, kind="tags")
    if name == "a.conll" and text.startswith("EU B-ORG"):
        corpus = open_corpus(tmp_path / name, dev=0, test=0, kind="tags", bad_lines="skip")
        assert list(corpus.train) == [("Bonn", "X")]
        with pytest.raises(UserError, match="the columns are two numbers, such as 0,3"):
            open_corpus(tmp_path / name, dev=0, test=0, kind="tags", columns="word,tag")
    two = tmp_path / "b.txt"
    two.write_text("x\n")
    with pytest.raises(UserError, match="words with their tags beside them are wanted"):
        open_corpus(f"{two},{two}", dev=0, test=0, kind="tags")


def test_spans():
    for tags, found in (
        ("O B-PER I-PER O B-LOC", {("PER", 1, 3), ("LOC", 4, 5)}),
        ("I-PER I-PER O I-LOC", {("PER", 0, 2), ("LOC", 3, 4)}),
        ("B-PER B-PER I-PER", {("PER", 0, 1), ("PER", 1, 3)}),
        ("B-PER I-LOC I-LOC", {("PER", 0, 1), ("LOC", 1, 3)}),
        ("B-A I-A E-A S-A I-A O", {("A", 0, 3), ("A", 3, 4), ("A", 4, 5)}),
        ("U-A B-x-y I-x-y L-x-y", {("A", 0, 1), ("x-y", 1, 4)}),
        ("NOUN VERB O", set()),
        ("", set()),
    ):
        assert spans(tags.split()) == found, tags


def test_metrics():
    right = [["B-PER I-PER O"], ["O B-LOC"]]
    said = ["a/B-PER b/I-PER c/B-LOC", "d/O e/B-PER"]
    assert parse_tags(said[0]) == ["B-PER", "I-PER", "B-LOC"]
    scores = {score.name: score.value for score in measure(["tag_accuracy", "span_f1"], said, right)}
    assert scores["tag_accuracy"] == pytest.approx(60)
    assert scores["span_f1"] == pytest.approx(100 * 2 * 1 / (3 + 2))
    with pytest.raises(UserError, match="none of the right ones begins a span"):
        measure(["span_f1"], ["a/NOUN"], [["NOUN"]])
    with pytest.raises(UserError, match="answer 1 has 1 tags, and there are 2 words"):
        measure(["tag_accuracy"], ["a/X"], [["X Y"]])


def test_refused(data, tmp_path):
    with pytest.raises(
        UserError, match="'accuracy' means nothing for this model: those that do are loss, tag_accuracy, span_f1"
    ):
        start(job(data, tmp_path / "run", metrics=["accuracy"]), quiet)
    with pytest.raises(UserError, match="needs an encoder"):
        start(
            Job("transformer-decoder", str(tmp_path / "run"), "tiny", SMALL, str(data), task="tag", as_published=True),
            quiet,
        )


def test_json_of_words(data, tmp_path):
    """JSON lines and CoNLL give the same records."""
    other = tmp_path / "words.jsonl"
    lines = [{"words": [w for w, _ in words], "tags": [t for _, t in words]} for words in sentences()]
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    one, two = (list(open_corpus(path, dev=0, test=0, kind="tags").train) for path in (data, other))
    assert one == two
