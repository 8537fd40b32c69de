"""Filling in masks: which tokens, in which order, and how they are written into a text."""

from itertools import product

import pytest
import tokenizers
import torch
from tokenizers import models, normalizers, pre_tokenizers, processors

import regard
from regard.core import UserError
from regard.data import Tokenizer
from regard.data.masks import with_special_tokens
from regard.decode import DecodeConfig
from regard.tasks.fill import Filler

SMALL = [
    "model.width=12",
    "model.heads=3",
    "model.depth=2",
    "model.layer.0.feedforward.hidden=20",
    "model.head.hidden=12",
]
TEXTS = ["the cat sat on the mat", "a dog and the cat", "on the mat sat a dog and a cat"]
HIDDEN = ["the [MASK] sat", "[MASK] dog [MASK] the cat sat on [MASK]", "a dog and [MASK]", "[MASK]"]


def filler(tokenizer, *more, vocab=None):
    """Build a model in float64 with large random weights."""
    torch.manual_seed(3)
    model = regard.build("roberta", "tiny", vocab or tokenizer.size, [*SMALL, *more]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return Filler(model, tokenizer, tokenizer)


@pytest.fixture(scope="module")
def words():
    return with_special_tokens(Tokenizer.train("words", TEXTS))


@pytest.fixture(scope="module")
def run(words):
    return filler(words)


def brute(run, text, best):
    """Return all fillings by the logits of the model, without special tokens."""
    tokenizer = run.source
    mask = tokenizer.inner.token_to_id("[MASK]")
    ids = [mask if word == "[MASK]" else tokenizer.encode([word])[0][0] for word in text.split()]
    row = torch.tensor([[tokenizer.start, *ids, tokenizer.end]])
    with torch.no_grad():
        logs = run.model(row).log_softmax(-1)[row == mask]
    open_to = [i for i in range(tokenizer.size) if i not in (*tokenizer.specials, mask)]
    every = [(sum(float(one[i]) for one, i in zip(logs, some, strict=True)), some)
             for some in product(open_to, repeat=len(logs))]  # fmt: skip
    return sorted(every, key=lambda pair: -pair[0])[:best], logs


@pytest.mark.parametrize("text", HIDDEN)
def test_the_likeliest_of_all_fillings(run, text):
    wanted, logs = brute(run, text, 7)
    found = run.predict([text], DecodeConfig(beam=7, num_return=7))[0]
    assert [one.score for one in found] == pytest.approx([score for score, _ in wanted])
    assert [one.tokens for one in found] == [run.source.tokens(some) for _, some in wanted]
    for one, (_, some) in zip(found, wanted, strict=True):
        assert one.probabilities == pytest.approx([float(log[i].exp()) for log, i in zip(logs, some, strict=True)])
        filled = iter(one.tokens)
        assert one.text == " ".join(next(filled) if word == "[MASK]" else word for word in text.split())
    assert len({one.text for one in found}) == 7


def test_a_batch_is_its_texts_one_by_one(run):
    together = run.predict(HIDDEN, DecodeConfig(beam=3, num_return=3))
    for text, answers in zip(HIDDEN, together, strict=True):
        alone = run.predict([text], DecodeConfig(beam=3, num_return=3))[0]
        assert [one.text for one in alone] == [one.text for one in answers]
        assert [one.score for one in alone] == pytest.approx([one.score for one in answers])
    assert [len(answers) for answers in run.predict(HIDDEN)] == [1] * 4
    assert next(run.stream(HIDDEN[0])) == run.predict(HIDDEN[:1])[0][0].text


def test_marks_and_numbers_without_a_token_are_no_answers(words):
    run = filler(words, vocab=words.size + 6)
    with torch.no_grad():
        run.model.head.bias[[words.pad, words.unk, words.start, words.end, -1, -6]] = 99.0
    answers = run.predict(["the [MASK] sat"], DecodeConfig(beam=50, num_return=50))[0]
    ordinary = set(words.inner.get_vocab()) - {"<pad>", "<unk>", "<s>", "</s>", "[MASK]"}
    assert {one.tokens[0] for one in answers} == ordinary
    assert sum(one.probabilities[0] for one in answers) < 1e-6, "of all tokens, the others among them"


def test_both_names_of_the_mask(run):
    assert run.predict(["the <mask> sat"])[0][0].text == run.predict(["the [MASK] sat"])[0][0].text


def test_nothing_to_fill_in(run):
    with pytest.raises(UserError, match=r"^line 2 has no mask: write \[MASK\] where"):
        run.predict(["the [MASK]", "the cat"])
    with pytest.raises(UserError, match=r"^line 3 has no mask"):
        list(run.answers(["[MASK]", "[MASK]", "cat"], read_ahead=2))
    assert run.predict([]) == []


def test_other_marks_in_other_texts_stay_texts(run):
    before = run.source.encode(["[MASK] </s>"])
    run.predict(["the [MASK] sat"])
    with pytest.raises(UserError):
        run.predict(["the cat"])
    assert run.source.encode(["[MASK] </s>"]) == before


def test_a_text_that_is_too_long(words):
    run = filler(words, "model.embed.position.length=8")
    with pytest.raises(UserError, match=r"line 1 has 10 tokens, and at most 8"):
        run.predict(["the [MASK] sat on the mat and a"])
    answer = run.predict(["the [MASK] sat on the mat and a"], DecodeConfig(truncate=True))[0][0]
    assert answer.cut
    assert answer.text.endswith("on the mat and a")
    with pytest.raises(UserError, match=r"line 2 is too long, and truncating it would remove a \[MASK\]"):
        run.predict(["[MASK]", "the cat sat on the mat and [MASK]"], DecodeConfig(truncate=True))


def test_a_tokenizer_without_a_mask():
    plain = Tokenizer.train("words", TEXTS)
    with pytest.raises(UserError, match="has no mask"):
        filler(plain).predict(["the [MASK]"])


# How tokens are written


def bert():
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "cat"]
    inner = tokenizers.Tokenizer(models.WordPiece({name: i for i, name in enumerate(pieces)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    inner.add_special_tokens(pieces[:5])
    return Tokenizer(inner)


def roberta():
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "Ġcat", "ing", "Ġplay", "play"]
    inner = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(pieces)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    inner.add_special_tokens(pieces[:5])
    return Tokenizer(inner)


def albert():
    pieces = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "▁cat", "ing", "▁play"]
    inner = tokenizers.Tokenizer(models.Unigram([(name, -1.0) for name in pieces], 1))
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.add_special_tokens(pieces[:5])
    return Tokenizer(inner)


WRITTEN = [
    (bert, "a [MASK] sat", ["cat"], "a cat sat"),
    (bert, "play [MASK] it", ["##ing"], "playing it"),
    (bert, "[MASK] [MASK].", ["play", "##ing"], "playing."),
    (roberta, "a [MASK] sat", ["Ġcat"], "a cat sat"),
    (roberta, "play [MASK], it", ["ing"], "playing, it"),
    (roberta, "<mask> <mask>!", ["play", "ing"], "playing!"),
    (roberta, "[MASK] sat", ["Ġcat"], "cat sat"),
    (albert, "a [MASK] sat", ["▁cat"], "a cat sat"),
    (albert, "[MASK] [MASK] it", ["▁play", "ing"], "playing it"),
]


@pytest.mark.parametrize(("make", "text", "tokens", "wanted"), WRITTEN)
def test_pieces_are_written_as_words(make, text, tokens, wanted):
    run = filler(make())
    assert run._fill_masks(run._with_own_mask(text), tokens) == wanted


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "characters", "bytes", "words"])
def test_the_right_tokens_give_the_text_back(kind):
    """Hide each token of a text in turn: with the right one in its place, tokens and text are what they were. Where
    pieces bring their spaces, the mask takes the space before it, so that no piece after a lone space is tried."""
    tokenizer = with_special_tokens(Tokenizer.train(kind, TEXTS * 4, 320))
    run = filler(tokenizer)
    text, mask, tried = TEXTS[0], tokenizer.inner.token_to_id("[MASK]"), 0
    encoding = tokenizer.inner.encode(text, add_special_tokens=False)
    for number, (begin, end), name in zip(encoding.ids, encoding.offsets, encoding.tokens, strict=True):
        if run.pieces.spaced and text[:begin].endswith(" "):
            continue
        hidden = text[:begin] + "[MASK]" + text[end:]
        assert run._fill_masks(hidden, [name]) == text
        row = run.encode_inputs([hidden], DecodeConfig())[0][0]
        assert [number if i == mask else i for i in row] == tokenizer.encode_with_special_tokens([text])[0]
        tried += 1
    assert tried >= 4
