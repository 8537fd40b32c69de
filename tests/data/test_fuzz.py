"""Any bytes under any file name give records, or one clear message."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.core import UserError
from regard.data import open_corpus

NAMES = ["a.tsv", "a.csv", "a.jsonl", "a.json", "a.parquet", "a.txt", "a.en", "a.tsv.gz", "a.csv.gz", "a.parquet.gz"]
FUZZ = settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
CELL = st.text() | st.sampled_from(["source", "target", "text", '"', "a,b", "x" * 60])
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | CELL,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CELL, inner, max_size=3),
    max_leaves=6,
)


def table(cells):
    names = [f"c{i}" for i in range(len(cells[0]))] if cells else ["source", "target"]
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({name: [row[i] for row in cells] for i, name in enumerate(names)}), file)
    return file.getvalue().to_pybytes()


def grids(cell):
    return st.integers(1, 4).flatmap(lambda wide: st.lists(st.lists(cell, min_size=wide, max_size=wide), max_size=5))


CONTENTS = st.one_of(
    st.binary(max_size=300),
    st.text().map(lambda text: text.encode()),
    st.lists(st.lists(CELL, max_size=4)).map(lambda rows: "\n".join(map("\t".join, rows)).encode()),
    st.lists(st.lists(CELL, max_size=4)).map(lambda rows: "\r\n".join(map(",".join, rows)).encode()),
    st.lists(VALUE).map(lambda values: "\n".join(map(json.dumps, values)).encode()),
    grids(CELL).map(table),
    st.binary(max_size=100).map(lambda data: b"PAR1" + data + b"PAR1"),
)


@st.composite
def damaged(draw):
    """Generate a file of a known format, possibly damaged, possibly gzipped and damaged again."""
    data = bytearray(draw(CONTENTS))
    for _ in range(2):
        for _ in range(draw(st.integers(0, 3))):
            if data:
                data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        if draw(st.integers(0, 4)) == 0:
            data = data[: draw(st.integers(0, len(data)))]
        if draw(st.booleans()):
            break
        data = bytearray(gzip.compress(bytes(data), mtime=0))
    return bytes(data)


def check(*given, **named):
    corpus, told = None, ""
    try:
        corpus = open_corpus(*given, **named)
    except UserError as error:
        told = str(error)
    if corpus is None:
        assert 0 < len(told) < 2000
        assert "\n" not in told
        return
    wide = 1 if named.get("kind") == "text" else 2
    for part in (corpus.train, corpus.dev, corpus.test):
        for row in part or ():
            assert len(row) == wide
            assert all(isinstance(text, str) and text.encode() for text in row)


@pytest.mark.parametrize("bad_lines", ["refuse", "skip"])
@given(
    name=st.sampled_from(NAMES),
    data=damaged(),
    kind=st.sampled_from(["pairs", "text"]),
    columns=st.none() | st.sampled_from(["0,1", "source,target", "1", "text", "c0,c1", "x.y,z", "", ","]),
    sizes=st.sampled_from([{}, {"dev": 0, "test": 0}, {"dev": 1}, {"dev": 0.5, "test": 0.5}]),
    max_chars=st.sampled_from([1, 50, 50_000]),
)
@FUZZ
def test_any_file(tmp_path, bad_lines, name, data, kind, columns, sizes, max_chars):
    path = tmp_path / name
    path.write_bytes(data)
    check(path, kind=kind, columns=columns, bad_lines=bad_lines, max_chars=max_chars, **sizes)


@pytest.mark.parametrize("bad_lines", ["refuse", "skip"])
@given(source=damaged(), target=damaged())
@FUZZ
def test_any_two_files(tmp_path, bad_lines, source, target):
    (tmp_path / "a.en").write_bytes(source)
    (tmp_path / "a.de").write_bytes(target)
    check(f"{tmp_path}/a.en,{tmp_path}/a.de", bad_lines=bad_lines)


@given(
    files=st.dictionaries(
        st.text(st.sampled_from("abdeinrstvx._-0"), min_size=1, max_size=12).filter(lambda name: name.strip("."))
        | st.sampled_from(["train.tsv", "train.en", "train.de", "dev.en", "dev.de", "test.csv", "train.txt.gz"]),
        CONTENTS,
        max_size=5,
    ),
    kind=st.sampled_from(["pairs", "text"]),
    sides=st.sampled_from([{}, {"source": "en", "target": "de"}]),
)
@FUZZ
def test_any_folder(tmp_path_factory, files, kind, sides):
    folder = tmp_path_factory.mktemp("folder")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    check(folder, kind=kind, bad_lines="skip", **sides)


@given(data=st.text(), dev=st.none() | st.text() | st.floats() | st.integers())
@FUZZ
def test_any_call(data, dev):
    check(data if data.strip() not in ("", ".", "..", "/") else "x.tsv", dev=dev)
