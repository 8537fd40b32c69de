"""Tokenizers of every kind round-trip texts, and no text becomes a special token."""

import json
from contextlib import suppress

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.core import UserError
from regard.data import Tokenizer
from regard.data.pieces import KINDS

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Didn't the fox know the dog? It didn't.",
    "我不知道他是谁。你知道吗？",
    "あの犬は速い。สวัสดีครับ",
    "Über 300 Füchse, <unk> & <s>more</s>!",
] * 20
EXACT = ("bpe", "unigram", "bytes", "characters")
HOSTILE = ["<0x41>", "<0xE4> <0x", "<pad>", "<s> a </s>", "x <pad> y", "</s>", "<unk>", "<|endoftext|>", "[CLS]"]


@pytest.fixture(scope="module")
def made():
    return {kind: Tokenizer.train(kind, iter(TEXTS), 400) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
class TestEvery:
    def test_marks(self, kind, made):
        tokenizer = made[kind]
        assert (tokenizer.pad, tokenizer.unk, tokenizer.start, tokenizer.end) == (0, 1, 2, 3)
        assert tokenizer.tokens([0, 1, 2, 3]) == ["<pad>", "<unk>", "<s>", "</s>"]
        assert 4 < tokenizer.size <= 400
        assert tokenizer.decode([2, 0, 3, 1]) == ""

    def test_numbers(self, kind, made):
        for ids in made[kind].encode(TEXTS[:5]):
            assert ids
            assert all(isinstance(i, int) and 0 <= i < made[kind].size for i in ids)

    def test_text_is_no_mark(self, kind, made):
        for ids in made[kind].encode(HOSTILE):
            assert not set(ids) & {0, 2, 3}

    def test_saved(self, kind, made, tmp_path):
        path = tmp_path / "new" / "tokenizer.json"
        made[kind].save(path)
        again = Tokenizer.load(path)
        assert again.encode(TEXTS + HOSTILE) == made[kind].encode(TEXTS + HOSTILE)
        assert (again.size, again.hash()) == (made[kind].size, made[kind].hash())
        assert [again.decode(ids) for ids in again.encode(TEXTS)] == [
            made[kind].decode(ids) for ids in made[kind].encode(TEXTS)
        ]
        assert again.tokens(range(again.size)) == made[kind].tokens(range(again.size))
        assert [entry.name for entry in path.parent.iterdir()] == ["tokenizer.json"]

    def test_decodes_any_numbers(self, kind, made):
        """Any ids can be decoded, arrays included."""
        rng = np.random.default_rng(0)
        for _ in range(50):
            assert isinstance(made[kind].decode(rng.integers(0, made[kind].size + 9, 7)), str)
        assert made[kind].tokens([99999]) == ["[99999]"]

    def test_reproducible(self, kind, made):
        if kind != "unigram":
            assert Tokenizer.train(kind, TEXTS, 400).hash() == made[kind].hash()

    def test_lowercase(self, kind):
        tokenizer = Tokenizer.train(kind, TEXTS, 400, lowercase=True, normalize="nfkc")
        upper, lower = tokenizer.encode(["ÜBER ﬁ THE DOG", "über fi the dog"])
        assert upper == lower
        assert len(set(lower)) > 2


@pytest.mark.parametrize("kind", EXACT)
def test_exact(kind, made):
    for text, ids in zip(TEXTS, made[kind].encode(TEXTS), strict=True):
        assert made[kind].decode(ids) == text


@pytest.mark.parametrize("kind", ["bpe", "unigram", "bytes"])
@given(text=st.text())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_back(kind, made, text):
    (ids,) = made[kind].encode([text])
    assert made[kind].decode(ids) == text
    assert not set(ids) & {0, 1, 2, 3}


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.characters(exclude_categories=())))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_goes_through(kind, made, text):
    """Texts with lone surrogates can be encoded."""
    (ids,) = made[kind].encode([text])
    assert isinstance(made[kind].decode(ids), str)
    assert not set(ids) & {0, 2, 3}


@given(
    kind=st.sampled_from(sorted(KINDS)),
    texts=st.lists(st.text(), max_size=6),
    size=st.integers(-1, 600),
    lowercase=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_learns_or_refuses(kind, texts, size, lowercase):
    try:
        tokenizer = Tokenizer.train(kind, texts, size, lowercase)
    except UserError:
        return
    assert all(max(ids, default=0) < tokenizer.size for ids in tokenizer.encode(texts))


@pytest.mark.parametrize("kind", ["bpe", "unigram", "bytes"])
def test_hostile_text_comes_back(kind, made):
    for text, ids in zip(HOSTILE, made[kind].encode(HOSTILE), strict=True):
        assert made[kind].decode(ids) == text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_rare_characters_are_bytes(kind, made):
    (ids,) = made[kind].encode(["the 鑫"])
    assert made[kind].tokens(ids)[-3:] == ["\\xe9", "\\x91", "\\xab"]
    assert made[kind].decode(ids[:-1]).startswith("the "), "a character cut short is no error"


def test_without_spaces(made):
    """Chinese is split into learned pieces, and decoded without spaces."""
    text = "我不知道他是谁。"
    assert len(made["bpe"].encode([text])[0]) < len(text)
    for kind in KINDS:
        if kind != "pretokenised":
            assert made[kind].decode(made[kind].encode([text])[0]) == text, kind


def test_words(made):
    ids = made["words"].encode(["The dog? the zebra"])[0]
    assert made["words"].tokens(ids) == ["The", "dog", "?", "the", "<unk>"]
    assert made["words"].decode(ids) == "The dog ? the"


def test_pretokenised():
    tokenizer = Tokenizer.train("pretokenised", ["AE1 B", "viel@@ er bü@@ sche ."])
    (ids,) = tokenizer.encode(["B  viel@@ er AE1 B ."])
    assert tokenizer.decode(ids) == "B viel@@ er AE1 B ."
    assert tokenizer.size == 11


def test_characters():
    tokenizer = Tokenizer.train("characters", ["aab", "ac", "ab"], 6)
    assert tokenizer.tokens(range(tokenizer.size)) == ["<pad>", "<unk>", "<s>", "</s>", "a", "b"], "the most frequent"
    assert tokenizer.encode(["abc"]) == [[4, 5, 1]]
    assert Tokenizer.train("characters", ["ba\n"]).tokens([4, 5, 6]) == ["\n", "a", "b"]


def test_bytes():
    tokenizer = Tokenizer.train("bytes", [])
    assert tokenizer.size == 260
    assert tokenizer.encode(["aß\0"]) == [[4 + byte for byte in "aß\0".encode()]]
    assert tokenizer.tokens([4 + 0xC3, 4 + ord("x"), 4 + ord("\n")]) == ["\\xc3", "x", "\\n"]


def test_keeps_lines(made):
    assert {kind for kind in KINDS if made[kind].keeps_newlines()} == {"bpe", "unigram", "bytes", "characters"}


def test_refuses():
    for arguments, what in [
        (("bp", []), "did you mean 'bpe'"),
        (("bpe", ["a"], 100), "at least 260"),
        (("words", ["a"], 2), "at least 5"),
        (("characters", []), "no text"),
        (("bpe", ["a"], 300, False, "nfd"), "unknown normalize"),
    ]:
        with pytest.raises(UserError, match=what):
            Tokenizer.train(*arguments)


def foreign(vocab, path):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(vocab)}, unk_token=vocab[0]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.enable_padding(length=9)
    inner.enable_truncation(2)
    inner.save(str(path))
    return path


def test_existing(tmp_path):
    """Special tokens are found by their usual names; those that are missing are added."""
    bert = Tokenizer.load(foreign(["[UNK]", "a", "[PAD]", "[SEP]", "[CLS]", "b"], tmp_path / "bert.json"))
    assert (bert.pad, bert.unk, bert.start, bert.end, bert.size) == (2, 0, 4, 3, 6)
    assert bert.encode(["a b a c"]) == [[1, 5, 1, 0]], "neither padded nor cut"
    t5 = Tokenizer.load(foreign(["<unk>", "a", "</s>"], tmp_path / "t5.json"))
    assert (t5.unk, t5.end, t5.pad, t5.start, t5.size) == (0, 2, 3, 4, 5)
    t5.save(tmp_path / "again.json")
    again = Tokenizer.load(tmp_path / "again.json")
    assert (again.pad, again.unk, again.start, again.end, again.size) == (t5.pad, t5.unk, t5.start, t5.end, t5.size)
    gpt2 = Tokenizer.load(foreign(["a", "<|endoftext|>"], tmp_path / "gpt2.json"))
    assert (gpt2.pad, gpt2.start, gpt2.end, gpt2.size) == (1, 1, 1, 2)


@pytest.mark.parametrize("data", [b"", b"no", b"{}", b"[]", b"\xff", b'{"model": 3}', b"[" * 100_000])
def test_no_tokenizer(data, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"is no tokenizer|cannot be read: 'utf-8'"):
        Tokenizer.load(path)
    with pytest.raises(UserError, match=r"holds no none\.json"):
        Tokenizer.load(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.load(tmp_path)


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_tokenizer(made, tmp_path, data):
    """A changed tokenizer.json loads or is refused."""
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    table = json.loads(made[kind].inner.to_str())
    where = data.draw(st.sampled_from(sorted(table)))
    inner = table[where]
    if isinstance(inner, dict) and inner and data.draw(st.booleans()):
        inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(st.sampled_from([None, 3, "x", [], {}]))
    else:
        table[where] = data.draw(st.sampled_from([None, 3, "x", [], {}]))
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(table))
    with suppress(UserError):
        assert Tokenizer.load(path).size > 0
