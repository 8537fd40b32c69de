"""Tokenizers from a stranger: a tokenizer.json is a programme, and may be written to have no end."""

import json

import pytest

from regard.convert import convert

from .corpus import NASTY, changed, dropped, hugging_face_folder, outcome, places, text_run

PREDICT = ("predict", "run", "run/texts.txt", "--most", "2")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    text_run(home / "run")
    told = json.loads((home / "run" / "run.json").read_text())
    (home / "run" / "run.json").write_text(json.dumps(told | {"tokenizers": None}))
    return home


@pytest.fixture
def table(home):
    path = home / "run" / "tokenizer.json"
    good = path.read_text()
    yield json.loads(good)
    path.write_text(good)


def told(home, table):
    (home / "run" / "tokenizer.json").write_text(json.dumps(table))
    return outcome(home, *PREDICT)


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(steps, kind="normalizers"):
    return {"type": "Sequence", kind: steps}


def template(pieces):
    return {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * pieces, "pair": [],
            "special_tokens": {}}  # fmt: skip


GROWING = {
    "doubled forty times": {"normalizer": sequence([replace({"String": "a"}, "aa")] * 40)},
    "by a pattern": {"normalizer": sequence([replace({"Regex": "[a-z]"}, "aa")] * 40)},
    "between characters": {"normalizer": sequence([replace({"Regex": "(?=a)"}, "a")] * 40)},
    "inside each other": {"normalizer": sequence([sequence([replace({"String": "a"}, "aa")] * 9)] * 5)},
    "at once": {"normalizer": replace({"String": "a"}, "a" * 100_000)},
    "as bytes": {"normalizer": sequence([{"type": "ByteLevel"}] * 40)},
    "by its template": {"post_processor": sequence([template(2)] * 40, "processors")},
    "many times in its template": {"post_processor": template(5000)},
    "when decoded": {"decoder": sequence([replace({"String": "a"}, "aa")] * 40, "decoders")},
    "in many steps": {"normalizer": sequence([{"type": "NFC"}] * 5000)},
    "before each text": {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
}


@pytest.mark.parametrize("case", GROWING)
def test_texts_that_would_grow_without_bound(home, table, case):
    found = told(home, table | GROWING[case])
    assert "run/tokenizer.json: " in found
    assert "times longer" in found or "5,000 steps" in found or "before each text" in found


def test_steps_that_real_tokenizers_have(home, table):
    spaces = [replace({"Regex": " {2,}"}, " "), replace({"String": "``"}, '"'), replace({"String": " "}, "▁")]
    steps = sequence([*spaces, {"type": "Prepend", "prepend": "▁"}, {"type": "NFKC"}])
    assert told(home, table | {"normalizer": steps}) == ""
    before = sequence(
        [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}], "pretokenizers"
    )
    assert told(home, table | {"pre_tokenizer": before}) == ""


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*)*x", "([a-z]+)*\\d"])
@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_patterns_that_never_stop_trying(home, table, capfd, part, pattern):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    step = split if part == "pre_tokenizer" else replace({"Regex": pattern}, "")
    text = home / "run" / "texts.txt"
    good = text.read_text()
    try:
        text.write_text("a" * 60 + "!\n")
        told(home, table | {part: step})
    finally:
        text.write_text(good)
    capfd.readouterr()  # what the library itself says


def test_every_value_of_a_tokenizer(home, table):
    small = table | {"added_tokens": table["added_tokens"][:2]}
    for path in places(small):
        if len(path) < 4:
            for made in (*(changed(small, path, value) for value in NASTY[::2]), dropped(small, path)):
                told(home, made)


def test_a_model_folder_with_such_a_tokenizer(tmp_path, home, table):
    folder = hugging_face_folder("gpt2", tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps(table | GROWING["doubled forty times"]))
    assert "more than 1,000 times longer" in outcome(tmp_path, "convert", "gpt2", "out")
    (folder / "tokenizer.json").write_text(json.dumps(table))
    convert(folder, tmp_path / "out")
