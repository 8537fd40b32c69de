"""Prepared files hold exactly what was encoded, are made once, and are never half-written."""

import errno
import os
from importlib import import_module

import numpy as np
import pyarrow as pa
import pytest

from regard.core import UserError
from regard.data import (
    BucketedBatches,
    PreparedDataset,
    Tokenizer,
    WindowBatches,
    first_epoch,
    open_corpus,
    prepare,
    prepare_text,
)
from regard.data.read import CorpusSplit

MODULE = import_module("regard.data.prepare")  # the package shows the function of that name
PAIRS = [(f"the {'big ' * (i % 5)}dog {i}", f"der {'sehr ' * (i % 3)}große hund {i}") for i in range(60)]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS))
    return open_corpus(path, dev=0, test=0).train


@pytest.fixture
def both(lines):
    return Tokenizer.train("words", lines.texts(0), 60), Tokenizer.train("bpe", lines.texts(1), 300)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(MODULE, "CHUNK", 7)


@pytest.fixture
def encoded(monkeypatch):
    """Record how many texts are encoded."""
    counts = []
    real = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, texts: counts.append(len(texts)) or real(self, texts))
    return counts


def test_what_was_encoded(lines, both, tmp_path):
    seen = []
    made = prepare(lines, both, tmp_path / "out" / "train.arrow", tick=seen.append)
    assert (len(made), made.lengths.shape, made.lengths.dtype, made.left_out) == (60, (60, 2), np.int32, 0)
    assert seen == [7, 14, 21, 28, 35, 42, 49, 56, 60]
    for i, pair in enumerate(PAIRS):
        for side, text, tokenizer, length in zip(made[i], pair, both, made.lengths[i], strict=True):
            assert side.tolist() == [*tokenizer.encode([text])[0], tokenizer.end]
            assert (len(side), side.dtype) == (length, np.int32)
    for out in (-1, 60):
        with pytest.raises(IndexError):
            made[out]
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["train.arrow", "train.arrow.json"]


def test_not_copied(lines, both, tmp_path):
    made = prepare(lines, both, tmp_path / "train.arrow")
    side = made[11][1]
    assert not side.flags.owndata
    assert not side.flags.writeable
    assert pa.total_allocated_bytes() < 100_000


@pytest.mark.parametrize(("longest", "fits"), [(7, lambda a, b: a <= 7 and b <= 7), ((5, 99), lambda a, b: a <= 5)])
def test_left_out(longest, fits, lines, both, tmp_path):
    whole = prepare(lines, both, tmp_path / "whole.arrow")
    made = prepare(lines, both, tmp_path / "some.arrow", longest)
    kept = [i for i, (a, b) in enumerate(whole.lengths) if fits(a, b)]
    assert 0 < len(kept) < 60
    assert made.left_out == 60 - len(kept)
    assert [[side.tolist() for side in made[i]] for i in range(len(made))] == [
        [side.tolist() for side in whole[i]] for i in kept
    ]
    assert PreparedDataset(tmp_path / "some.arrow").left_out == made.left_out
    with pytest.raises(UserError, match="none of the 60 examples"):
        prepare(lines, both, tmp_path / "none.arrow", 1)


def test_reused(lines, both, tmp_path, encoded):
    path = tmp_path / "train.arrow"
    prepare(lines, both, path)
    encoded.clear()
    again = prepare(open_corpus(tmp_path / "a.tsv", dev=0, test=0).train, both, path)
    assert (encoded, len(again)) == ([], 60)


def changes(lines, both, tmp_path):
    """Yield inputs with one change each that may change the result."""
    source = tmp_path / "a.tsv"
    yield lines, both[::-1], None
    yield lines, both, 7
    yield open_corpus(source, dev=0, test=0, columns="1,0").train, both, None
    yield open_corpus(source, dev=9, test=0).train, both, None
    yield open_corpus(source, dev=9, test=0, seed=2).train, both, None
    os.utime(source, (1, 1))
    yield open_corpus(source, dev=0, test=0).train, both, None


def test_made_again(lines, both, tmp_path, encoded):
    path = tmp_path / "train.arrow"
    prepare(lines, both, path)
    for given, tokenizers, longest in changes(lines, both, tmp_path):
        encoded.clear()
        prepare(given, tokenizers, path, longest)
        assert encoded


def test_killed(lines, both, tmp_path, encoded):
    """A file that is incomplete in any way is made again."""
    path = tmp_path / "train.arrow"
    prepare(lines, both, path)
    whole = path.read_bytes()
    for damage in (
        lambda: path.write_bytes(whole[:-5]),
        path.unlink,
        (tmp_path / "train.arrow.json").unlink,
        lambda: (tmp_path / "train.arrow.json").write_text('{"key"'),
    ):
        damage()
        with pytest.raises(UserError, match="not prepared data, or was not finished"):
            PreparedDataset(path)
        encoded.clear()
        assert len(prepare(lines, both, path)) == 60
        assert encoded


def test_note_never_speaks_of_another_file(lines, both, tmp_path, monkeypatch):
    """If the process is killed between writing the file and its note, the old note is gone."""
    path = tmp_path / "train.arrow"
    prepare(lines, both, path)
    monkeypatch.setattr(MODULE.json, "dumps", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(MODULE, "_cache_key", lambda *_: "another")
    with pytest.raises(ZeroDivisionError):
        prepare(lines, both, path)
    assert not (tmp_path / "train.arrow.json").exists()


def test_bad_line_leaves_nothing(lines, both, tmp_path):
    with open(tmp_path / "a.tsv", "ab") as file:
        file.write(b"late \xff\tx\n")
    with pytest.raises(UserError, match="line 61"):
        prepare(lines, both, tmp_path / "out.arrow")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tsv"]


def test_full_disk(lines, both, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MODULE, "_lists", full)
    with pytest.raises(UserError, match=r"out\.arrow cannot be written: the disk is full"):
        prepare(lines, both, tmp_path / "out.arrow")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tsv"]


def test_damaged(tmp_path, lines, both):
    path = tmp_path / "train.arrow"
    prepare(lines, both, path)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(UserError, match="is damaged"):
        PreparedDataset(path)


def test_batches_of_it(lines, both, tmp_path):
    made = prepare(lines, both, tmp_path / "train.arrow")
    seen = []
    for batch in first_epoch(BucketedBatches(made, 64, 1, both[1].start, both[1].pad)):
        for row in batch.targets:
            seen.append(both[1].decode(row[row >= 0]))
    assert sorted(seen) == sorted(b for _, b in PAIRS)


class TestText:
    TEXT = "To be,\nor not\n\nto be: 我\n" * 9

    def open(self, tmp_path) -> CorpusSplit:
        path = tmp_path / "a.txt"
        path.write_text(self.TEXT)
        return open_corpus(path, kind="text", dev=0, test=0).train

    @pytest.mark.parametrize("kind", ["characters", "bpe", "bytes", "unigram"])
    def test_stream(self, kind, tmp_path, encoded):
        lines = self.open(tmp_path)
        tokenizer = Tokenizer.train(kind, lines.texts(), 300)
        seen = []
        stream = prepare_text(lines, tokenizer, tmp_path / "a.ids", seen.append)
        assert isinstance(stream, np.memmap)
        assert (stream.ndim, stream.dtype, seen[-1]) == (1, np.int32, 36)
        assert tokenizer.decode(stream) == self.TEXT
        assert tokenizer.end not in stream
        encoded.clear()
        again = prepare_text(lines, tokenizer, tmp_path / "a.ids")
        assert np.array_equal(stream, again)
        assert sum(encoded) == 1, "only to see whether line ends are kept"
        batch = next(first_epoch(WindowBatches(stream, 5, 2, 1)))
        assert batch.tokens.shape == (2, 5)

    def test_words(self, tmp_path):
        """The end token replaces line ends where the tokenizer has no token for them."""
        lines = self.open(tmp_path)
        tokenizer = Tokenizer.train("words", lines.texts())
        stream = prepare_text(lines, tokenizer, tmp_path / "a.ids")
        assert tokenizer.tokens(stream[:9]) == ["To", "be", ",", "</s>", "or", "not", "</s>", "</s>", "to"]

    def test_documents(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "ab\\n"}\n{"text": "b"}\n')
        lines = open_corpus(path, kind="text", dev=0, test=0).train
        tokenizer = Tokenizer.train("characters", lines.texts())
        stream = prepare_text(lines, tokenizer, tmp_path / "a.ids")
        assert tokenizer.tokens(stream) == ["a", "b", "\n", "</s>", "b", "</s>"]
