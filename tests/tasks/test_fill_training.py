"""Masked language models: what is masked, pairs of texts, the loss, and runs that learn, stop and resume."""

import json
import random

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models, normalizers, pre_tokenizers

import regard
from regard.cli import main
from regard.core import UserError
from regard.data import IGNORE, Tokenizer, first_epoch
from regard.data.masking import ELSEWHERE, NEXT, MaskedBatches, TokenMasker
from regard.data.masks import Pieces, Template, mask_token, with_special_tokens
from regard.parts.objectives.masked import Masked, MaskingConfig, masked_metrics
from regard.runs.job import Job
from regard.train.job import resume, start

NAMES = ["anna", "bert", "carl", "dora", "emil", "fred", "gina", "hans"]
FOOD = ["apples", "bread", "cheese", "dumplings", "eggs", "figs", "grapes", "honey"]
TINY = ["model.width=12", "model.heads=3", "model.depth=1", "model.dropout=0.1", "model.layer.0.feedforward.hidden=20"]


def sentences(count, seed=0):
    """Return sentences in which the name determines the food."""
    rng = random.Random(seed)
    who = [rng.randrange(len(NAMES)) for _ in range(count)]
    return [f"{NAMES[i]} likes to eat {FOOD[i]} today ." for i in who]


@pytest.fixture(scope="module")
def words():
    return with_special_tokens(Tokenizer.train("words", sentences(200)))


def stream_of(tokenizer, texts):
    return np.array([i for ids in tokenizer.encode(texts) for i in [*ids, tokenizer.end]], np.int32)


def masking(tokenizer, texts, share=0.15, whole_word=False, context=17, budget=170, seed=3, **more):
    hide = TokenMasker(tokenizer, share, whole_word)
    return MaskedBatches(stream_of(tokenizer, texts), tokenizer, hide, context, budget, seed, **more)


# What is hidden


def test_eighty_ten_ten(words):
    batches = masking(words, sentences(2000), context=40, budget=4000)
    rows = [batches.make(numbers) for numbers in batches.epoch(0)]
    mask = words.inner.token_to_id("[MASK]")
    asked = hidden = left = total = 0
    for batch in rows:
        at = batch.targets != IGNORE
        marks = torch.isin(batch.targets, torch.tensor([words.start, words.end, words.pad]))
        assert not marks.any()
        assert (batch.tokens[:, 0] == words.start).all()
        asked += int(at.sum())
        hidden += int((batch.tokens[at] == mask).sum())
        left += int((batch.tokens[at] == batch.targets[at]).sum())
        known = torch.isin(batch.tokens, torch.tensor([words.start, words.end, words.pad]))
        total += int((~known).sum())
        assert batch.count == int(at.sum())
    assert asked / total == pytest.approx(0.15, abs=0.01)
    assert hidden / asked == pytest.approx(0.8, abs=0.03)
    assert left / asked == pytest.approx(0.1 + 0.1 / len(set(batches.masker.ordinary_ids)), abs=0.03)


def test_what_is_not_asked_for_is_read_as_it_is(words):
    batches = masking(words, sentences(60), shuffle=False)
    for numbers in batches.epoch(0):
        for row, (begin, end) in zip(_plain(batches.make(numbers)), numbers[:, 1:], strict=True):
            assert row.tolist() == batches.stream[begin:end].tolist()


def _plain(batch):
    """Return the rows without special tokens, with masked tokens restored."""
    tokens = torch.where(batch.targets == IGNORE, batch.tokens, batch.targets)
    valid = torch.ones_like(tokens, dtype=torch.bool) if batch.valid is None else batch.valid
    return [row[ok][1:-1].numpy() for row, ok in zip(tokens, valid, strict=True)]


def test_every_token_is_seen_once_an_epoch_and_cut_elsewhere_the_next(words):
    batches = masking(words, sentences(60))
    cuts = []
    for number in (0, 1):
        begins_ends = np.concatenate([numbers[:, 1:] for numbers in batches.epoch(number)])
        order = begins_ends[begins_ends[:, 0].argsort()]
        assert order[0, 0] == 0
        assert order[-1, 1] == len(batches.stream)
        assert (order[1:, 0] == order[:-1, 1]).all()
        assert ((order[:, 1] - order[:, 0]) <= 15).all()
        cuts.append(order[1, 0])
    assert cuts[0] != cuts[1]


def test_the_seed_the_epoch_and_the_batch_decide(words):
    one, two, other = (masking(words, sentences(60), seed=seed) for seed in (3, 3, 4))
    numbers = one.epoch(2)[1]
    assert np.array_equal(numbers, two.epoch(2)[1])
    same, again = one.make(numbers), two.make(numbers)
    one.make(one.epoch(0)[0])
    assert torch.equal(same.tokens, again.tokens)
    assert torch.equal(same.targets, one.make(numbers).targets)
    later = numbers.copy()
    later[:, 0] += 1
    assert not torch.equal(same.targets, one.make(later).targets)
    assert not torch.equal(same.targets, other.make(numbers).targets)


def test_how_many_rows_a_batch_has_does_not_matter(words):
    texts, found = sentences(60), []
    for budget in (17, 170):
        batches = masking(words, texts, budget=budget, next_sentence=True)
        rows = {}
        for numbers in batches.epoch(1):
            batch = batches.make(numbers)
            for (_, begin, end), tokens, targets in zip(numbers.tolist(), batch.tokens, batch.targets, strict=True):
                rows[begin, end] = (tokens[: end - begin + 3].tolist(), targets[: end - begin + 3].tolist())
        found.append(rows)
    assert found[0] == found[1]


def test_at_least_one_is_asked_for(words):
    hide = TokenMasker(words, 0.15, False)
    ids = np.array([words.start, words.encode(["anna"])[0][0], words.end])
    _, targets = hide(ids, np.random.default_rng(0))
    assert targets.tolist() == [IGNORE, ids[1], IGNORE]
    _, targets = hide(np.array([words.start, words.end]), np.random.default_rng(0))
    assert (targets == IGNORE).all()


# Words


def _wordpiece():
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "cat", "##s", "a", "."]
    inner = tokenizers.Tokenizer(models.WordPiece({name: i for i, name in enumerate(pieces)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.add_special_tokens(pieces[:5])
    return Tokenizer(inner)


def _byte_level():
    pieces = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "<mask>",
        "un",
        "Ġun",
        "aff",
        "able",
        "Ġcat",
        "s",
        "Ġa",
        ".",
        "Ċ",
        "Ã",
        "©",
    ]
    inner = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(pieces)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(pieces[:5])
    return Tokenizer(inner)


def _sentencepiece():
    pieces = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "▁un", "aff", "able", "▁cat", "s", "▁a", ".", "▁"]
    inner = tokenizers.Tokenizer(models.Unigram([(name, -1.0) for name in pieces], 1))
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.add_special_tokens(pieces[:5])
    return Tokenizer(inner)


CONVENTIONS = [
    (_wordpiece, "[CLS] un ##aff ##able cat ##s . [SEP] ##s", [0, 1, 1, 1, 2, 2, 3, 4, 5]),
    (_byte_level, "<s> un aff able Ġcat s . Ċ aff Ã © Ġa </s> s", [0, 1, 1, 1, 2, 2, 3, 4, 5, 5, 5, 6, 7, 8]),
    (_sentencepiece, "<s> ▁un aff able ▁cat s . ▁ s ▁a </s>", [0, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7]),
]


@pytest.mark.parametrize(("make", "tokens", "wanted"), CONVENTIONS, ids=["##", "Ġ", "▁"])
def test_pieces_of_a_word(make, tokens, wanted):
    tokenizer = make()
    ids = np.array([tokenizer.inner.token_to_id(token) for token in tokens.split()])
    assert Pieces(tokenizer).words(ids).tolist() == wanted, "a piece after a mark begins by itself"


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "words", "characters", "bytes", "pretokenised"])
def test_pieces_of_the_tokenizers_that_are_learned_here(kind):
    texts = ["unaffable cats sat, 12 times", "the naïve cat's mat"]
    tokenizer = with_special_tokens(Tokenizer.train(kind, texts * 3, 280))
    for text in texts:
        ids = np.array(tokenizer.encode([text])[0])
        pieces = Pieces(tokenizer)
        found = pieces.words(ids)
        told = ["".join(pieces.texts[i] for i in ids[found == word]).strip() for word in range(found[-1] + 1)]
        if kind != "bytes":
            assert {word for word in told if word.isalpha()} <= {"unaffable", "cats", "sat", "times", "the", "naïve",
                                                                   "cat", "cat's", "s", "mat"}  # fmt: skip
        assert "unaffable" in told or "mat" in told


def test_whole_words_are_asked_for_together():
    texts = ["unaffable cats sat on the naïve mats, all 12 of them"] * 40
    tokenizer = with_special_tokens(Tokenizer.train("characters", texts))
    whole, single = (masking(tokenizer, texts, 0.2, word, context=53, budget=600) for word in (True, False))

    def broken(batches):
        """Return the words of which some but not all letters are targets."""
        count = 0
        for batch in first_epoch(batches):
            for row, targets in zip(_plain(batch), batch.targets, strict=True):
                at = (targets[1 : len(row) + 1] != IGNORE).numpy()
                words = batches.masker.pieces.words(row)
                count += sum(0 < at[words == word].mean() < 1 for word in range(words[-1] + 1))
        return count

    assert broken(whole) == 0
    assert broken(single) > 20
    for batch in first_epoch(whole):
        for targets in batch.targets:
            asked = int((targets != IGNORE).sum())
            assert 1 <= asked <= max(round(0.2 * 51), 9)


def test_marks_are_added_where_there_are_none(words):
    assert mask_token(words) == "[MASK]"
    assert words.tokens(words.encode_with_special_tokens(["anna likes"])[0]) == ["<s>", "anna", "likes", "</s>"]
    ids, segments = words.encode_pairs([("anna", "bert likes")])[0]
    assert words.tokens(ids) == ["<s>", "anna", "</s>", "bert", "likes", "</s>"]
    assert segments == [0, 0, 0, 1, 1, 1]
    assert with_special_tokens(words).hash() == words.hash()
    assert words.tokens(words.encode(["[MASK]"])[0]) != ["[MASK]"], "in a text to be learned from it is a text"


@pytest.mark.parametrize("texts", [1, 2])
def test_a_template_frames_as_the_tokenizer_does(words, texts):
    said = ["anna likes", "bert"][:texts]
    ids, segments = Template.read(words, texts).apply([np.array(ids) for ids in words.encode(said)])
    if texts == 1:
        assert ids.tolist() == words.encode_with_special_tokens(said)[0]
        assert not segments.any()
    else:
        assert (ids.tolist(), segments.tolist()) == words.encode_pairs([tuple(said)])[0]


# Pairs


def test_half_of_the_second_texts_come_next(words):
    texts = [f"{NAMES[i % 8]} {FOOD[(i * 3) % 8]} {FOOD[(i // 8) % 8]}" for i in range(900)]
    batches = masking(words, texts, context=21, budget=210, next_sentence=True, shuffle=False)
    stream, known = batches.stream.tolist(), []
    for numbers in batches.epoch(0):
        batch = batches.make(numbers)
        tokens = torch.where(batch.targets == IGNORE, batch.tokens, batch.targets)
        for row, segments, label, (begin, end) in zip(
            tokens, batch.segments, batch.next_sentence_labels, numbers[:, 1:], strict=True
        ):
            length = end - begin + 3
            first = row[:length][segments[:length] == 0][1:-1].tolist()
            second = row[:length][segments[:length] == 1][:-1].tolist()
            assert first == stream[begin : begin + len(first)]
            assert len(first) + len(second) == end - begin
            if label == NEXT:
                assert second == stream[begin + len(first) : end]
            known.append(int(label))
            assert first[-1] == words.end, "cut at the end of a line"
    assert set(known) == {NEXT, ELSEWHERE}
    assert np.mean(known) == pytest.approx(0.5, abs=0.12)


def test_what_comes_next_is_never_called_something_else(words):
    """A text too short to take a second text from elsewhere, and no other document."""
    batches = masking(words, [" ".join(NAMES)], context=30, next_sentence=True)
    for epoch in range(20):
        assert batches.make(batches.epoch(epoch)[0]).next_sentence_labels.tolist() == [NEXT]


def test_pairs_keep_to_their_document(words):
    texts = [" ".join([NAMES[i % 8]] * (3 + i % 9)) for i in range(160)]
    batches = masking(words, texts, context=13, budget=130, next_sentence=True, documents=True)
    for batch in first_epoch(batches):
        tokens = torch.where(batch.targets == IGNORE, batch.tokens, batch.targets)
        for row, segments, label in zip(tokens, batch.segments, batch.next_sentence_labels, strict=True):
            inside = ~torch.isin(row, torch.tensor([words.start, words.end, words.pad]))
            first, second = (set(row[inside & (segments == side)].tolist()) for side in (0, 1))
            assert len(first) == len(second) == 1
            if label == NEXT:
                assert first == second
    assert len(batches.begins) == 160


def test_a_text_that_is_too_short(words):
    one = masking(words, ["anna"], context=300)
    assert one.make(one.epoch(0)[0]).tokens.shape == (1, 4)
    with pytest.raises(UserError, match="no position for text besides 2 special tokens"):
        masking(words, ["anna"], context=2)
    with pytest.raises(UserError, match="no text is long enough"):
        masking(words, ["anna", "bert"], next_sentence=True, documents=True)


# The loss


def build(tokenizer, recipe="bert", *more):
    torch.manual_seed(0)
    hidden = (
        ["model.head.tokens.hidden=12", "model.head.pair.hidden=12"] if recipe == "bert" else ["model.head.hidden=12"]
    )
    return regard.build(recipe, "tiny", tokenizer.size, [*TINY, *hidden, *more])


def test_the_loss_is_that_of_what_is_asked_for(words):
    batches = masking(words, sentences(80), context=23, next_sentence=True)
    batch = batches.make(batches.epoch(0)[0])
    assert batch.valid is None or not batch.valid.all()
    model = build(words).double().eval()
    found = Masked()(model, batch)
    scores = model(batch.tokens, batch.valid, segments=batch.segments)
    tokens = F.cross_entropy(scores.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum")
    assert found.nll.item() == pytest.approx(tokens.item(), rel=1e-9)
    seen = {}
    handle = model.head.pair.register_forward_hook(lambda module, given, out: seen.update(out=out))
    Masked()(model, batch)
    handle.remove()
    pairs = F.cross_entropy(seen["out"], batch.next_sentence_labels)
    assert found.loss.item() == pytest.approx((tokens + batch.count * pairs).item(), rel=1e-9)
    smooth = Masked(0.1)(model, batch)
    assert smooth.nll.item() == pytest.approx(tokens.item(), rel=1e-9)
    assert smooth.loss.item() != pytest.approx(found.loss.item(), rel=1e-4)
    told = masked_metrics(model, [batch])
    assert told["loss"] == pytest.approx(tokens.item() / batch.count, rel=1e-5)
    at = batch.targets != IGNORE
    assert told["accuracy"] == pytest.approx(100 * float((scores[at].argmax(-1) == batch.targets[at]).double().mean()))
    assert told["next_sentence"] == pytest.approx(
        100 * float((seen["out"].argmax(-1) == batch.next_sentence_labels).double().mean())
    )


# Runs


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(sentences(400)) + "\n")
    return path


def job(text, run, recipe="bert", *more, **train):
    hidden = (
        ["model.head.tokens.hidden=12", "model.head.pair.hidden=12"] if recipe == "bert" else ["model.head.hidden=12"]
    )
    settings = {"steps": 6, "batch_tokens": 300, "context_length": 24, "warmup": 1, "lr": 0.01, **train}
    overrides = [*TINY, *hidden, *(f"train.{key}={value}" for key, value in settings.items()), *more]
    return Job(recipe, str(run), "tiny", overrides, str(text), dev="0.1", tokenizer="words", as_published=True)


def quiet(sentence):
    pass


@pytest.mark.parametrize("recipe", ["bert", "roberta"])
def test_a_run_goes_on_to_the_last_bit(text, tmp_path, recipe):
    """A run with whole-word masking resumes in the middle of an epoch."""
    whole = start(job(text, tmp_path / "whole", recipe, "objective.whole_word=true", steps=13), quiet)
    whole.train()
    start(job(text, tmp_path / "run", recipe, "objective.whole_word=true", steps=5), quiet).train()
    again = resume(tmp_path / "run", {"steps": 13}, quiet)
    again.train()
    one, two = (tmp_path / name / "checkpoints" / "step-00000013" / "model.safetensors" for name in ("whole", "run"))
    assert one.read_bytes() == two.read_bytes()
    wanted = {"loss", "accuracy", "step"} | ({"next_sentence"} if recipe == "bert" else set())
    assert set(again.trainer.metrics) == wanted


def test_it_learns_to_fill_in(tmp_path, capsys):
    """A model learns to fill in masks in lines that repeat one name."""
    rng = random.Random(0)
    text = tmp_path / "calls.txt"
    text.write_text("".join(" ".join([rng.choice(NAMES)] * 21) + "\n" for _ in range(150)))
    settings = {
        "steps": 90,
        "batch_tokens": 200,
        "context_length": 11,
        "eval_steps": 30,
        "schedule": "linear",
        "warmup": 10,
    }
    steady = ("model.dropout=0.0", "model.layer.0.mixer.weight_dropout=0.0")
    prepared = start(job(text, tmp_path / "run", "roberta", *steady, **settings), quiet)
    run = prepared.train()
    assert prepared.trainer.metrics["accuracy"] > 70
    asked = ["anna anna [MASK] anna anna anna", "<mask> bert bert bert bert"]
    assert [a[0].text for a in run.predict(asked)] == ["anna anna anna anna anna anna", "bert bert bert bert bert"]
    assert main(["evaluate", str(tmp_path / "run"), "--part", "dev", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scores"]["loss"] == pytest.approx(prepared.trainer.metrics["loss"], rel=1e-4)
    assert set(told["scores"]) == {"loss", "accuracy"}


def test_what_cannot_be(text, tmp_path):
    for more, match in (
        (["objective.share=1.5"], "objective.share must be between 0 and 1"),
        (["objective.sahre=0.5"], "did you mean 'objective.share'"),
        (["objective.next_sentence=true"], 'model.head = "pretrain"'),
        (["train.context_length=600"], "positions of this model reach only 512"),
        (["train.metric=bleu"], "'bleu' means nothing for this model: those that do are loss, accuracy"),
    ):
        with pytest.raises(UserError, match=match):
            start(job(text, tmp_path / "bad", "roberta", *more), quiet)
    with pytest.raises(UserError, match="share must be between"):
        MaskingConfig(share=0.0)


@pytest.mark.parametrize("form", ["tsv", "jsonl", "headless"])
def test_texts_with_labels_are_for_another_task(tmp_path, form):
    path = tmp_path / f"reviews.{'jsonl' if form == 'jsonl' else 'tsv'}"
    rows = [(text, str(number % 2)) for number, text in enumerate(sentences(50))]
    if form == "jsonl":
        path.write_text("".join(json.dumps({"text": a, "label": b}) + "\n" for a, b in rows))
    else:
        path.write_text(("" if form == "headless" else "text\tlabel\n") + "".join(f"{a}\t{b}\n" for a, b in rows))
    small = ["train.steps=1", "train.context_length=16"]
    with pytest.raises(UserError, match="--task classify"):
        start(Job("bert", str(tmp_path / "run"), "tiny", small, str(path), as_published=True), print)
    column = "0" if form == "headless" else "text"
    assert start(Job("bert", str(tmp_path / "run"), "tiny", small, str(path), columns=column, as_published=True), print)
