"""The columns that are selected by default, and the tables that are refused as ambiguous."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regard.core import UserError
from regard.data import open_corpus


def put(path, *rows, mark="\t"):
    path.write_text("".join(mark.join(row) + "\n" for row in rows))
    return path


def rows_of(path, **given):
    return list(open_corpus(path, dev=0, test=0, **given).train)


def refused(path, **given):
    with pytest.raises(UserError) as caught:
        open_corpus(path, dev=0, test=0, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


THREE = [("Hi.", "Salut !", "CC-BY 2.0"), ("Run!", "Cours !", "CC-BY 2.0")]


@pytest.mark.parametrize(("name", "mark"), [("a.tsv", "\t"), ("a.csv", ",")])
def test_three_columns_without_a_header_are_refused(tmp_path, name, mark):
    path = put(tmp_path / name, *THREE, mark=mark)
    told = refused(path)
    assert told.startswith(f"{path}: there are 3 columns ('Hi.', 'Salut !', 'CC-BY 2.0')")
    for flag in ("--columns 0,1", "--header yes", "--task match"):
        assert flag in told
    assert rows_of(path, columns="0,1") == [row[:2] for row in THREE]
    assert rows_of(path, columns="1,0") == [row[1::-1] for row in THREE]
    assert rows_of(path, kind="matches") == THREE
    assert rows_of(path, header="yes", columns="Hi.,CC-BY 2.0") == [("Run!", "CC-BY 2.0")]


def test_four_columns_are_no_match(tmp_path):
    path = put(tmp_path / "a.tsv", *((*row, "x") for row in THREE))
    told = refused(path, kind="matches")
    assert "there are 4 columns" in told
    assert "--columns 0,1,2" in told


@pytest.mark.parametrize("columns", ["1,1", "text,text", "label,1"])
def test_the_same_column_twice_is_refused(tmp_path, columns):
    path = put(tmp_path / "a.tsv", ("text", "label"), ("good", "yes"), ("bad", "no"))
    assert f"named twice in --columns {columns}" in refused(path, columns=columns)


def test_an_empty_last_column_is_none(tmp_path):
    path = put(tmp_path / "a.tsv", *((*row[:2], "") for row in THREE))
    assert rows_of(path) == [row[:2] for row in THREE]


@pytest.mark.parametrize("form", ["tsv", "jsonl", "parquet"])
def test_names_that_say_nothing_are_refused(tmp_path, form):
    names, values = ("key", "remark", "outcome"), ("7", "hello there", "greeting")
    path = tmp_path / f"a.{form}"
    if form == "tsv":
        put(path, names, values)
        given = {"header": "yes"}
    else:
        given = {}
        record = dict(zip(names, values, strict=True))
        if form == "jsonl":
            path.write_text(json.dumps(record) + "\n")
        else:
            pq.write_table(pa.table({name: [value] for name, value in record.items()}), path)
    told = refused(path, **given)
    assert "there are 3 columns ('key', 'remark', 'outcome')" in told
    assert "such as --columns key,remark" in told
    assert "--header" not in told
    assert rows_of(path, columns="remark,outcome", **given) == [values[1:]]
    assert "--columns key" in refused(path, kind="text", **given)


@pytest.mark.parametrize(
    ("names", "kind", "taken"),
    [
        (("text", "label"), "pairs", (0, 1)),
        (("idx", "sentence", "label"), "pairs", (1, 2)),
        (("label", "text"), "pairs", (1, 0)),
        (("text", "label", "label_text"), "pairs", (0, 1)),
        (("Review", "Sentiment"), "pairs", (0, 1)),
        (("id", "word", "pronunciation"), "pairs", (1, 2)),
        (("en", "de", "score"), "pairs", (0, 1)),
        (("en", "id"), "pairs", (0, 1)),
        (("", "question", "answer"), "pairs", (1, 2)),
        (("id", "text"), "text", (1,)),
        (("sentence1", "sentence2", "similarity_score"), "matches", (0, 1, 2)),
        (("idx", "premise", "hypothesis", "gold_label"), "matches", (1, 2, 3)),
    ],
)
@pytest.mark.parametrize("form", ["tsv", "jsonl"])
def test_usual_names_are_known(tmp_path, names, kind, taken, form):
    values = tuple(f"v{number}" for number in range(len(names)))
    path = tmp_path / f"a.{form}"
    if form == "tsv":
        put(path, names, values)
    else:
        path.write_text(json.dumps(dict(zip(names, values, strict=True))) + "\n")
    assert rows_of(path, kind=kind) == [tuple(values[number] for number in taken)]


@pytest.mark.parametrize("line", [("source_text", "target_text"), ("Source sentence", "Target sentence"),
                                  ("en_text", "de_text"), ("text_en", "label_1")])  # fmt: skip
def test_a_line_that_looks_like_names_is_asked_about(tmp_path, line):
    path = put(tmp_path / "a.tsv", line, ("one", "eins"), ("two", "zwei"))
    told = refused(path)
    assert f"'{line[0]}', '{line[1]}'" in told
    assert "--header yes" in told
    assert "--header no" in told
    assert rows_of(path, header="yes") == [("one", "eins"), ("two", "zwei")]
    assert rows_of(path, header="no") == [line, ("one", "eins"), ("two", "zwei")]
    assert rows_of(path, header="yes", columns=f"{line[1]},{line[0]}") == [("eins", "one"), ("zwei", "two")]


@pytest.mark.parametrize(
    "line",
    [("the title", "der Titel"), ("no answer", "keine Antwort"), ("text me", "schreib mir"), ("Hi.", "No!")],
)  # fmt: skip
def test_ordinary_lines_are_data(tmp_path, line):
    assert rows_of(put(tmp_path / "a.tsv", line, ("one", "eins"))) == [line, ("one", "eins")]


def test_a_column_number_is_no_name(tmp_path):
    """A first line with a cell '1' is not taken as a header because column 1 was asked for."""
    path = put(tmp_path / "a.tsv", ("a fine film", "1"), ("a bore", "0"))
    assert rows_of(path, columns="0,1") == [("a fine film", "1"), ("a bore", "0")]


def test_header_can_be_said(tmp_path):
    path = put(tmp_path / "a.tsv", ("text", "label"), ("one", "x"))
    assert rows_of(path) == [("one", "x")]
    assert rows_of(path, header="no") == [("text", "label"), ("one", "x")]
    assert "header is yes or no, not 'maybe'" in refused(path, header="maybe")
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "a", "label": "b"}\n')
    assert "--header is for TSV and CSV" in refused(lines, header="yes")


def test_a_text_beside_something_is_asked_about(tmp_path):
    path = put(tmp_path / "a.tsv", ("a fine film", "good"), ("a bore", "bad"))
    told = refused(path, kind="text")
    assert "there are 2 columns ('a fine film', 'good')" in told
    assert "--columns 0" in told
    assert "--task classify" in told
    assert rows_of(path, kind="text", columns="0") == [("a fine film",), ("a bore",)]
