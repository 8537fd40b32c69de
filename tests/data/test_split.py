"""Splitting one file in three: reproducible, and with no source in two splits."""

import pytest

from regard.core import UserError
from regard.data import open_corpus, split


def rows(count, copies=1):
    return [(f"s{i}", f"t{i} {copy}") for i in range(count) for copy in range(copies)]


def put(tmp_path, records):
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in records))
    return path


def parts(corpus):
    return {name: list(part) for name in ("train", "dev", "test") if (part := getattr(corpus, name)) is not None}


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (900, 50, 50)),
        ({"dev": 0.1, "test": 0.2}, (700, 100, 200)),
        ({"dev": 37, "test": 0}, (963, 37, 0)),
        ({"dev": "0.25", "test": "1"}, (749, 250, 1)),
        ({"dev": 0, "test": 0}, (1000, 0, 0)),
    ],
)
def test_sizes(given, sizes, tmp_path):
    records = rows(1000)
    corpus = open_corpus(put(tmp_path, records), **given)
    found = parts(corpus)
    assert tuple(len(found.get(name, ())) for name in ("train", "dev", "test")) == pytest.approx(sizes, abs=2)
    for name, part in found.items():
        assert getattr(corpus, name).count == len(part)
    assert sorted(row for part in found.values() for row in part) == sorted(records)


def test_no_source_in_two_parts(tmp_path):
    found = parts(open_corpus(put(tmp_path, rows(200, copies=5)), dev=0.2, test=0.2))
    sources = {name: {a for a, _ in part} for name, part in found.items()}
    assert all(sources.values())
    assert not sources["train"] & sources["dev"]
    assert not sources["train"] & sources["test"]
    assert not sources["dev"] & sources["test"]


def test_reproducible(tmp_path):
    """The split depends on the seed alone, not on the order of the lines."""
    records = rows(300)
    first = parts(open_corpus(put(tmp_path, records), seed=3))
    again = parts(open_corpus(put(tmp_path, records[::-1]), seed=3))
    assert {name: sorted(part) for name, part in first.items()} == {name: sorted(part) for name, part in again.items()}
    assert parts(open_corpus(put(tmp_path, records), seed=4))["test"] != first["test"]
    assert split.hash_bin("word", 1) == 400116, "never another place in another version"


def test_larger_dev_leaves_test(tmp_path):
    path = put(tmp_path, rows(400))
    small, large = (parts(open_corpus(path, dev=dev, test=40)) for dev in (10, 90))
    assert small["test"] == large["test"]
    assert set(small["dev"]) < set(large["dev"])


def test_too_few(tmp_path):
    for records in (rows(1), rows(2), rows(1, copies=50)):
        with pytest.raises(UserError, match="cannot be split"):
            open_corpus(put(tmp_path, records))
    assert {name: len(part) for name, part in parts(open_corpus(put(tmp_path, rows(3)))).items()} == {
        "train": 1, "dev": 1, "test": 1,
    }  # fmt: skip
    with pytest.raises(UserError, match="cannot be split"):
        open_corpus(put(tmp_path, rows(30)), dev=31)


def test_stretches(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    with pytest.raises(UserError, match="leaves nothing to train on"):
        open_corpus(path, kind="text", dev=5000)
    found = parts(open_corpus(path, kind="text", dev=0.2, test=0.3))
    assert [row for name in ("train", "dev", "test") for row in found[name]] == [(f"line {i}\n",) for i in range(100)]
    assert {name: len(part) for name, part in found.items()} == pytest.approx(
        {"train": 50, "dev": 20, "test": 30}, abs=3
    )
