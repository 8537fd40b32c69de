"""Every supported data format, and every way in which a file can be wrong."""

import csv
import gzip
import io
import json
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regard.core import UserError
from regard.data import open_corpus, overlap

PAIRS = [
    ('He said "no", twice.', "Er sagte zweimal »nein«."),
    ("a, b; c", "x | y"),
    ("我不知道。", "I don't know."),
    ("null \x00 and bell \x07", "stays \x0b here \u2028 too"),
    (" leading and trailing ", "\ufeffmark"),
]


def tsv(rows):
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def as_csv(rows, delimiter=","):
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(rows)
    return text.getvalue().encode()


def jsonl(rows):
    return "".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in rows).encode()


def parquet(rows, names=("source", "target")):
    file = pa.BufferOutputStream()
    pq.write_table(
        pa.table({name: list(side) for name, side in zip(names, zip(*rows, strict=True), strict=True)}), file
    )
    return file.getvalue().to_pybytes()


FORMS = {"tsv": tsv, "csv": as_csv, "jsonl": jsonl, "parquet": parquet, "txt": tsv}


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def everything(corpus):
    return [row for part in (corpus.train, corpus.dev, corpus.test) if part is not None for row in part]


def refused(*given, **named):
    with pytest.raises(UserError) as caught:
        open_corpus(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("zipped", ["", ".gz"])
@pytest.mark.parametrize("form", FORMS)
def test_round_trip(form, zipped, tmp_path):
    path = put(tmp_path / f"pairs.{form}{zipped}", FORMS[form](PAIRS))
    corpus = open_corpus(path, dev=0, test=0)
    assert list(corpus.train) == PAIRS
    assert list(corpus.train) == PAIRS, "read again"
    assert (corpus.train.count, corpus.dev, corpus.test) == (len(PAIRS), None, None)


@pytest.mark.parametrize("zipped", ["", ".gz"])
def test_parallel(zipped, tmp_path):
    sides = [[row[i] for row in PAIRS] for i in (0, 1)]
    files = [put(tmp_path / f"a.{e}{zipped}", "\n".join(s).encode()) for e, s in zip(("en", "de"), sides, strict=True)]
    for corpus in (
        open_corpus(f"{files[0]},{files[1]}", dev=0, test=0),
        open_corpus(source=str(files[0]), target=str(files[1]), dev=0, test=0),
    ):
        assert list(corpus.train) == PAIRS


def test_line_ends(tmp_path):
    """A carriage return before a line feed belongs to the line end; a byte order mark is dropped."""
    path = put(tmp_path / "a.tsv", b"\xef\xbb\xbfone\tuno\r\ntwo\tdos\r\nthree\ttres")
    assert list(open_corpus(path, dev=0, test=0).train) == [("one", "uno"), ("two", "dos"), ("three", "tres")]


def test_csv_over_several_lines(tmp_path):
    path = put(tmp_path / "a.csv", b'source,target\n"two\nlines","he said ""x"""\n\nplain,too\nonly one\n')
    corpus = open_corpus(path, dev=0, test=0, bad_lines="skip")
    assert list(corpus.train) == [("two\nlines", 'he said "x"'), ("plain", "too")]
    hint = "mend it, or leave out all that are bad (--bad-lines skip)"
    assert refused(path, dev=0, test=0) == f"{path}, line 6: column 'target' is missing: 1 column here; {hint}"


@pytest.mark.parametrize("mark", [";", "\t"])
def test_csv_of_other_countries(mark, tmp_path):
    path = put(tmp_path / "a.csv", as_csv([("src", "tgt")] + [("a b", "c, d")] * 2, mark))
    assert list(open_corpus(path, dev=0, test=0).train) == [("a b", "c, d")] * 2


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (None, ("s", "t")),
        ("tgt,note", ("t", "n")),
        ("2,0", ("t", "n")),
        ((0, 1), ("n", "s")),
    ],
)
def test_columns(columns, expected, tmp_path):
    record = {"note": "n", "src": "s", "tgt": "t"}
    files = [
        put(tmp_path / "a.tsv", tsv([tuple(record), tuple(record.values())])),
        put(tmp_path / "a.csv", as_csv([tuple(record), tuple(record.values())])),
        put(tmp_path / "a.jsonl", json.dumps(record).encode()),
        put(tmp_path / "a.parquet", parquet([tuple(record.values())], tuple(record))),
    ]
    for path in files:
        assert list(open_corpus(path, columns=columns, dev=0, test=0).train) == [expected], path


def test_nested_columns(tmp_path):
    rows = [{"id": 1, "translation": {"en": "a", "de": "b"}, "score": 0.5, "words": ["x", "y"]}]
    path = put(tmp_path / "a.jsonl", json.dumps(rows[0]).encode())
    table = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table)
    for file in (path, table):
        assert list(open_corpus(file, columns="translation.en,translation.de", dev=0, test=0).train) == [("a", "b")]
        assert list(open_corpus(file, columns="words,score", dev=0, test=0).train) == [("x y", "0.5")]
    assert "column 'translation' is not a text" in refused(path, columns="translation,score", dev=0, test=0)


def test_missing_column(tmp_path):
    for name, data in (
        ("a.tsv", tsv([("src", "tgt"), ("a", "b")])),
        ("a.jsonl", jsonl(PAIRS)),
        ("a.parquet", parquet(PAIRS)),
    ):
        path = put(tmp_path / name, data)
        told = refused(path, columns="src,taget")
        assert told.startswith(f"{path}: there is no column ")
        assert "did you mean 'target'" in told or "did you mean 'tgt'" in told or "known: source, target" in told
    assert "counted from 0" in refused(tmp_path / "a.tsv", columns="0,2")
    assert "no header" in refused(put(tmp_path / "b.tsv", tsv(PAIRS)), columns="x,y")
    assert "2 columns are wanted, and 3" in refused(tmp_path / "a.tsv", columns="0,1,2")
    assert "one column" in refused(put(tmp_path / "c.csv", b"alone\nhere\n"))


def test_column_missing_in_one_record(tmp_path):
    path = put(tmp_path / "a.jsonl", jsonl(PAIRS[:2]) + b'{"source": "x", "taget": "y"}\n')
    told = refused(path)
    assert told.startswith(f"{path}, line 3: column 'target' is missing; did you mean 'taget'?")


def test_text(tmp_path):
    """The records of a running text, joined, are the text."""
    text = "First.\n\n  Second\ttab.\nÜber 我\n" * 40
    corpus = open_corpus(put(tmp_path / "a.txt.gz", text.encode()), kind="text")
    assert not corpus.train.documents
    assert "".join(t for part in (corpus.train, corpus.dev, corpus.test) for (t,) in part) == text
    for part in (corpus.dev, corpus.test):
        assert 0.02 < sum(len(t) for (t,) in part) / len(text) < 0.08
    assert corpus.train.count == sum(1 for _ in corpus.train)
    parts = open_corpus(tmp_path / "a.txt.gz", kind="text", dev=100, test=0.25)
    assert "".join(t for part in (parts.train, parts.dev, parts.test) for (t,) in part) == text
    assert overlap(parts.train, parts.dev) == 0, "lines of a text may repeat"


def test_documents(tmp_path):
    path = put(tmp_path / "a.jsonl", b'{"id": 1, "text": "one\\ntwo"}\n{"id": 2, "text": "three"}\n')
    corpus = open_corpus(path, kind="text", dev=0, test=0)
    assert corpus.train.documents
    assert list(corpus.train) == [("one\ntwo",), ("three",)]


class TestFolder:
    @pytest.mark.parametrize("dev", ["dev", "valid", "val", "validation"])
    @pytest.mark.parametrize("form", ["tsv", "jsonl.gz", "parquet"])
    def test_tables(self, form, dev, tmp_path):
        for name, rows in (("train", PAIRS[:3]), (dev, PAIRS[3:4]), ("test", PAIRS[4:])):
            put(tmp_path / f"{name}.{form}", FORMS[form.removesuffix(".gz")](rows))
        put(tmp_path / "README.md", b"hello")
        corpus = open_corpus(tmp_path)
        assert [list(part) for part in (corpus.train, corpus.dev, corpus.test)] == [PAIRS[:3], PAIRS[3:4], PAIRS[4:]]
        assert open_corpus(tmp_path, test=0).test is None

    def parallel(self, folder, *ends):
        for part, rows in (("train", PAIRS[:3]), ("val", PAIRS[3:])):
            for i, end in enumerate(ends):
                put(folder / f"{part}.{end}", "".join(row[i % 2] + "\n" for row in rows).encode())

    @pytest.mark.parametrize("ends", [("en", "de"), ("src", "tgt"), ("en.gz", "de.gz"), ("en.txt", "de.txt")])
    def test_parallel(self, ends, tmp_path):
        self.parallel(tmp_path / "en-de", *ends)
        corpus = open_corpus(tmp_path / "en-de")
        assert (list(corpus.train), list(corpus.dev), corpus.test) == (PAIRS[:3], PAIRS[3:], None)
        self.parallel(tmp_path / "other", *ends)
        names = [end.split(".")[0] for end in ends]
        turned = open_corpus(tmp_path / "other", source=names[1], target=names[0])
        assert list(turned.train) == [(b, a) for a, b in PAIRS[:3]]

    def test_direction_is_told(self, tmp_path):
        self.parallel(tmp_path, "en", "de")
        corpus = open_corpus(tmp_path)
        assert list(corpus.train) == [(b, a) for a, b in PAIRS[:3]]
        assert corpus.notes == [f"{tmp_path}: from de to en; for the other way, give --source en --target de"]

    def test_which_two(self, tmp_path):
        self.parallel(tmp_path, "en", "de", "fr")
        assert "train.de, train.en, train.fr: say which two" in refused(tmp_path)
        assert list(open_corpus(tmp_path, source="en", target="de").train) == PAIRS[:3]
        assert "holds no train.it (there: train.de, train.en, train.fr)" in refused(tmp_path, source="en", target="it")

    def test_shards(self, tmp_path):
        for i in range(3):
            put(tmp_path / f"train-0000{i}-of-00003.parquet", parquet(PAIRS[i : i + 1]))
        assert list(open_corpus(tmp_path, dev=0, test=0).train) == PAIRS[:3]

    def test_several_tests(self, tmp_path):
        self.parallel(tmp_path / "de-en", "de", "en")
        for name in ("test_2016.de", "test_2016.en", "test_2017.de", "test_2017.en"):
            put(tmp_path / "de-en" / name, b"x\n")
        corpus = open_corpus(tmp_path / "de-en")
        assert list(corpus.test) == [("x", "x")]
        assert any("taking test_2016; also there: test_2017" in note for note in corpus.notes)

    def test_prefixed_names(self, tmp_path):
        for part in ("train", "dev"):
            put(tmp_path / f"sts-{part}.tsv.gz", tsv(PAIRS))
        assert list(open_corpus(tmp_path).dev) == PAIRS

    def test_dev_of_train(self, tmp_path):
        """A folder without dev files gets a dev split from train; its test files are unchanged."""
        put(tmp_path / "train.tsv", tsv([(f"s{i}", "t") for i in range(300)]))
        put(tmp_path / "test.tsv", tsv(PAIRS))
        corpus = open_corpus(tmp_path)
        assert (corpus.train.count, corpus.dev.count, list(corpus.test)) == (285, 15, PAIRS)

    def test_without_train(self, tmp_path):
        put(tmp_path / "data.tsv", tsv(PAIRS))
        assert refused(tmp_path).startswith(f"{tmp_path} holds no train file")
        assert "but data.tsv" in refused(tmp_path)
        assert "but nothing" in refused(tmp_path.joinpath("empty").mkdir() or tmp_path / "empty")


class TestBad:
    def wrong(self, tmp_path, name, data, line, what, skipped, left=2):
        """A bad line is refused with file and line number, or skipped and counted."""
        path = put(tmp_path / name, data)
        told = refused(path, dev=0, test=0)
        assert told.startswith(f"{path}, {line}: "), told
        assert what in told
        corpus = open_corpus(path, dev=0, test=0, bad_lines="skip")
        assert (dict(corpus.skipped), corpus.train.count, len(list(corpus.train))) == (skipped, left, left)
        assert dict(corpus.train.skipped) == skipped
        assert corpus.notes[-1].startswith(f"skipped {sum(skipped.values())} bad line")

    @pytest.mark.parametrize("zipped", ["", ".gz"])
    def test_not_utf8(self, zipped, tmp_path):
        bad = b"a\tb\nc\t\xff\nd\te\n"
        self.wrong(tmp_path, f"a.tsv{zipped}", bad, "line 2", "byte 3 (0xff) is not UTF-8", {"not UTF-8": 1})

    def test_empty_side(self, tmp_path):
        self.wrong(tmp_path, "a.tsv", b"a\tb\n \tb\nc\td\n", "line 2", "column 0 is empty", {"empty": 1})
        self.wrong(
            tmp_path, "a.csv", b'source,target\na,b\n"",b\nc,d\n', "line 3", "column 'source' is empty", {"empty": 1}
        )
        null = b'{"source":"a","target":"b"}\n{"source":"a","target":null}\n{"source":"c","target":"d"}'
        self.wrong(tmp_path, "a.jsonl", null, "line 2", "column 'target' is empty", {"empty": 1})
        self.wrong(
            tmp_path, "a.parquet", parquet([("a", "b"), ("", "b"), ("c", "d")]), "row 2", "is empty", {"empty": 1}
        )

    def test_too_few_columns(self, tmp_path):
        self.wrong(tmp_path, "a.tsv", b"a\tb\nc\nd\te\n", "line 2", "column 1 is missing", {"too few columns": 1})

    @pytest.mark.parametrize("letters", [100_000, 5_000_000])
    def test_too_long(self, letters, tmp_path):
        long = b"x" * letters
        limit = "50,000" if letters < 1_000_000 else "1,000,000"  # of a text, of a line of several
        self.wrong(tmp_path, "a.tsv", b"a\tb\n" + long + b"\td\ne\tf", "line 2", limit, {"too long": 1})
        one, other = put(tmp_path / "a.en", b"a\n" + long), put(tmp_path / "a.de", b"a\nb")
        assert refused(f"{one},{other}").startswith(f"{one}, line 2: more than 50,000 characters")

    @pytest.mark.parametrize("letters", [1_999, 2_000, 100_000, 5_000_000])
    @pytest.mark.parametrize("what", ["x", "ä b", "字"])
    def test_a_long_line_of_a_running_text(self, letters, what, tmp_path):
        """A long line is read in pieces, which joined are the text, and split like any other."""
        long = what * (letters // len(what))
        text = put(tmp_path / "a.txt", f"short\r\n{long}\nlast".encode())
        pieces = [piece for (piece,) in open_corpus(text, kind="text", dev=0, test=0).train]
        assert "".join(pieces) == f"short\n{long}\nlast\n"
        assert max(map(len, pieces)) <= 2000
        assert what != "ä b" or not any(piece.endswith(" ") for piece in pieces)
        alone = put(tmp_path / "b.txt", (long + "\n").encode())
        if letters > 10_000:
            parts = open_corpus(alone, kind="text", dev=0.2, test=0)
            sizes = [sum(len(piece) for (piece,) in part) for part in (parts.train, parts.dev)]
            assert sizes[0] / sizes[1] == pytest.approx(4, rel=0.2)

    def test_a_long_line_that_is_not_utf8(self, tmp_path):
        text = put(tmp_path / "a.txt", b"good\n" + b"x" * 3_000_000 + b"\xff" + b"y" * 10)
        assert refused(text, kind="text").startswith(f"{text}, line 2: byte")

    def test_not_json(self, tmp_path):
        bad = b'{"source":"a","target":"b"}\n{"source":\n\n{"source":"c","target":"d"}'
        self.wrong(tmp_path, "a.jsonl", bad, "line 2", "not JSON", {"not JSON": 1})
        for line in (b"3", b'"text"', b"[" * 30_000, b'{"n": ' + b"9" * 5000 + b"}"):
            assert refused(put(tmp_path / "b.jsonl", line)).startswith(f"{tmp_path / 'b.jsonl'}, line 1: ")
        half = b'{"source":"\\ud800","target":"b"}\n' + jsonl(PAIRS[:2])
        self.wrong(tmp_path, "c.jsonl", half, "line 1", "surrogate", {"not UTF-8": 1})

    def test_not_csv(self, tmp_path):
        bad = b'a,b\nc,"d" e\ng,h\n'
        self.wrong(tmp_path, "a.csv", bad, "line 2", "not CSV", {"not CSV": 1})
        assert "line 2: not CSV" in refused(put(tmp_path / "b.csv", b'a,b\nc,"d\n' + b"e,f\n" * 50_000))

    def test_parquet_not_utf8(self, tmp_path):
        texts = pa.array([b"a", b"\xff", b"c"]).view(pa.binary()).cast(pa.binary())
        strings = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
        pq.write_table(pa.table({"source": strings, "target": ["x", "y", "z"]}), tmp_path / "a.parquet")
        data = (tmp_path / "a.parquet").read_bytes()
        self.wrong(tmp_path, "b.parquet", data, "row 2", "column 'source' is not UTF-8", {"not UTF-8": 1})

    def test_parallel(self, tmp_path):
        a, b = put(tmp_path / "a.en", b"1\n2\n3\n4\n"), put(tmp_path / "a.de", b"1\n2\n3\n")
        assert refused(f"{a},{b}").startswith(f"{a}, line 4: {b} ends after line 3 and {a} goes on; ")
        assert refused(f"{b},{a}").startswith(f"{a}, line 4: {b} ends after line 3 and {a} goes on; ")
        corpus = open_corpus(f"{a},{b}", bad_lines="skip", dev=0, test=0)
        assert (corpus.train.count, dict(corpus.skipped)) == (3, {"no partner": 1})
        put(b, b"1\n \n3\n4\xff\n")
        assert refused(f"{a},{b}").startswith(f"{b}, line 2: this line is empty")
        corpus = open_corpus(f"{a},{b}", bad_lines="skip", dev=0, test=0)
        assert list(corpus.train) == [("1", "1"), ("3", "3")], "the others stay together"
        assert dict(corpus.skipped) == {"empty": 1, "not UTF-8": 1}

    def test_nothing_left(self, tmp_path):
        path = put(tmp_path / "a.tsv", b"a\t\n\tb\n")
        assert refused(path, bad_lines="skip") == f"{path} holds no usable record (skipped: 2 empty)"
        assert "holds no usable record" in refused(put(tmp_path / "b.tsv", b"source\ttarget\n"))
        assert "holds no" in refused(put(tmp_path / "b.parquet", parquet_without_rows()))

    @pytest.mark.parametrize(
        ("name", "data", "what"),
        [
            ("a.tsv.gz", b"a\tb\n", "not gzip"),
            ("a.tsv", gzip.compress(b"a\tb\n", mtime=0), "is gzip"),
            ("a.parquet", b"a\tb\n", "not Parquet"),
            ("a.tsv", parquet(PAIRS), "is Parquet"),
            ("a.parquet", b"PAR1" + b"\0" * 60 + b"PAR1", "damaged"),
            ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), "damaged"),
            ("a.parquet", parquet(PAIRS)[:-9], "damaged"),
            ("a.tsv.gz", gzip.compress(tsv(PAIRS * 999))[:-20], "damaged"),
            ("a.csv", b"PK\x03\x04 and so on", "zip archive"),
            ("a.txt", "a\tb\n".encode("utf-16"), "UTF-16"),
            ("a.tsv", b"", "is empty"),
            ("a.tsv.gz", b"", "is empty"),
            ("a.tsv.gz", gzip.compress(b"", mtime=0), "is empty"),
            ("a.txt", b"one text a line\n", "pairs are wanted"),
        ],
    )
    def test_not_what_it_says(self, name, data, what, tmp_path):
        path = tmp_path / name
        path.write_bytes(data)
        for bad_lines in ("refuse", "skip"):
            told = refused(path, bad_lines=bad_lines)
            assert told.startswith(str(path))
            assert what in told

    def test_missing(self, tmp_path):
        put(tmp_path / "train.tsv", tsv(PAIRS))
        assert refused(tmp_path / "trian.tsv").endswith(f"did you mean '{tmp_path / 'train.tsv'}'?")
        assert "nor a folder" in refused(tmp_path / "no" / "a.tsv")
        assert "there is no file" in refused(f"{tmp_path / 'train.tsv'},{tmp_path / 'x.tsv'}")
        assert "there is no file" in refused(tmp_path / "train.tsv", dev=str(tmp_path / "dev.tsv"))
        assert "no file" in refused("a\0b.tsv")
        assert "no file" in refused("x" * 5000 + ".tsv")

    def test_calls(self, tmp_path):
        path = put(tmp_path / "a.tsv", tsv(PAIRS))
        assert "which data" in refused()
        assert "did you mean 'pairs'" in refused(path, kind="pair")
        assert "did you mean 'skip'" in refused(path, bad_lines="skipp")
        assert "max_chars" in refused(path, max_chars=0)
        assert "leave out" in refused(path, source="en", target="de")
        assert "3 files" in refused("a,b,c")
        assert "both source and target" in refused(tmp_path, source="en")
        assert "are pairs" in refused(f"{path},{path}", kind="text")
        assert "not plain text" in refused(f"{path},{path}")
        assert "share below 1" in refused(path, dev=1.5)
        for size in ("-3", "nan", "inf", -1, 1e400):
            assert "share below 1" in refused(path, dev=size)
            assert "share below 1" in refused(put(tmp_path / "a.txt", b"a\n" * 9), kind="text", dev=size)


def parquet_without_rows():
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({"source": pa.array([], pa.string()), "target": pa.array([], pa.string())}), file)
    return file.getvalue().to_pybytes()


def test_sample(tmp_path):
    """A large corpus gives a sample of about the given size, the same each time."""
    path = put(tmp_path / "a.tsv", tsv([(f"source {i:05}", f"target {i:05}") for i in range(5000)]))
    train = open_corpus(path, dev=0, test=0).train
    assert len(list(train.texts())) == 10_000
    assert list(train.texts(1))[:2] == ["target 00000", "target 00001"]
    some = list(train.texts(max_chars=24_000))
    assert 1600 < len(some) < 2400
    assert some == list(train.texts(max_chars=24_000)) != list(train.texts(max_chars=24_000, seed=2))


def test_overlap(tmp_path):
    put(tmp_path / "train.tsv", tsv([("a", "1"), ("b", "2"), ("b", "3"), ("c", "4")]))
    put(tmp_path / "dev.tsv", tsv([("b", "2"), ("b", "9"), ("x", "1"), ("c", "4")]))
    corpus = open_corpus(tmp_path)
    assert overlap(corpus.train, corpus.dev) == 3


def test_tick(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.data.read.TICK_EVERY", 2)
    seen = []
    open_corpus(put(tmp_path / "a.tsv", tsv(PAIRS)), dev=0, test=0, tick=seen.append)
    assert seen == [2, 4]


class TestHub:
    def test_not_installed(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        told = refused("wmt/wmt16:de-en")
        assert told.startswith("there is no file or folder 'wmt/wmt16:de-en'")
        assert "pip install datasets" in told

    def library(self, monkeypatch, load):
        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))

    def test_loads(self, monkeypatch):
        rows = [{"translation": {"en": a, "de": b}} for a, b in PAIRS]
        asked = []
        self.library(monkeypatch, lambda *names: asked.append(names) or {"train": rows, "validation": rows[:2]})
        corpus = open_corpus("wmt/wmt16:en-de")
        assert asked == [("wmt/wmt16", "en-de")]
        assert (list(corpus.train), list(corpus.dev), corpus.test) == (PAIRS, PAIRS[:2], None)
        turned = open_corpus("hf:wmt", columns="translation.de,translation.en")
        assert next(iter(turned.train)) == PAIRS[0][::-1]

    def test_no_network(self, monkeypatch):
        def load(*names):
            raise ConnectionError("could not\nreach the hub")

        self.library(monkeypatch, load)
        assert refused("some_name").endswith("no dataset of that name: could not reach the hub")

    def test_no_train(self, monkeypatch):
        self.library(monkeypatch, lambda *names: {"everything": [{"a": "b"}]})
        assert "has no part 'train'" in refused("some_name")
