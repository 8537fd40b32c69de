"""Tokenizers from a stranger: a tokenizer.json is a programme, and may be written to have no end."""

import base64
import json

import pytest

from regard.convert import convert
from regard.data.tame import check_growth

from .corpus import NASTY, changed, dropped, hugging_face_folder, outcome, places, text_run

PREDICT = ("predict", "run", "run/texts.txt", "--max-new-tokens", "2")


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


def template(pieces, ids=0):
    """ids: of a special token before the text."""
    single = [{"Sequence": {"id": "A", "type_id": 0}}] * pieces
    single += [{"SpecialToken": {"id": "x", "type_id": 0}}] if ids else []
    known = {"x": {"id": "x", "ids": [1] * ids, "tokens": ["x"] * ids}} if ids else {}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": known}


def metaspace(letter):
    return {"type": "Metaspace", "replacement": letter, "prepend_scheme": "always", "split": True}


def charsmap(letters=18):
    """A map whose longest entry has so many letters: 18 in SentencePiece's nmt_nfkc."""
    data = (8).to_bytes(4, "little") + bytes(8) + "\u0635".encode() * letters + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": False,
        "lowercase": False}  # fmt: skip
EACH = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}


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
    "before each text, then grown": {
        "normalizer": sequence(
            [{"type": "Prepend", "prepend": "a" * 1000}] * 999 + [replace({"String": "a"}, "a" * 1000)]
        )
    },
    "before each text, many times": {"normalizer": sequence([{"type": "Prepend", "prepend": "a" * 1000}] * 999)},
    "by a special token of its template": {"post_processor": template(1, 100_000)},
    "by many special tokens": {"post_processor": sequence([template(1, 900)] * 500, "processors")},
    "by steps without a type": {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 40}},
    "behind another list": {"normalizer": {"x": [1], **sequence([replace({"String": "a"}, "aa")] * 40)}},
    "by a map of characters": {"normalizer": sequence([charsmap(40)] * 2)},
    "by compatible forms": {"normalizer": sequence([replace({"String": "a"}, "\ufdfa"), {"type": "NFKC"}] * 40)},
    "around Chinese": {"normalizer": sequence([BERT, replace({"String": " "}, "\u4e2d")] * 40)},
    "before each piece": {
        "pre_tokenizer": sequence([piece for one in "xy" * 20 for piece in (EACH, metaspace(one))], "pretokenizers")
    },
    "when decoded, between letters": {"decoder": sequence([{"type": "BPEDecoder", "suffix": ""}] * 40, "decoders")},
    **{
        f"where {pattern!r} matches nothing": {"normalizer": sequence([replace({"Regex": pattern}, "a")] * 40)}
        for pattern in ("", "()", "b{,1}", "a\\K", "\\y", "(?#x)")
    },
}


@pytest.mark.parametrize("case", GROWING)
def test_texts_that_would_grow_without_bound(home, table, case):
    found = told(home, table | GROWING[case])
    assert "run/tokenizer.json: " in found
    assert any(words in found for words in ("times longer", "5,000 steps", "before each text"))


def test_steps_that_real_tokenizers_have(home, table):
    spaces = [replace({"Regex": " {2,}"}, " "), replace({"String": "``"}, '"'), replace({"String": " "}, "▁")]
    steps = sequence([*spaces, {"type": "Prepend", "prepend": "▁"}, {"type": "NFKC"}])
    assert told(home, table | {"normalizer": steps}) == ""
    before = sequence(
        [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}], "pretokenizers"
    )
    assert told(home, table | {"pre_tokenizer": before}) == ""
    forms = [*spaces[1:], {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, charsmap(), spaces[0]]
    pieces = sequence([{"type": "WhitespaceSplit"}, metaspace("▁")], "pretokenizers")
    check_growth(table | {"normalizer": sequence(forms), "pre_tokenizer": pieces})  # as ALBERT's
    clip = sequence([{"type": "NFC"}, replace({"Regex": "\\s+"}, " "), {"type": "Lowercase"}])
    assert told(home, table | {"normalizer": clip, "pre_tokenizer": before}) == ""
    assert told(home, table | {"normalizer": BERT, "post_processor": template(1, 2)}) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab": {"<unk>": 0, "a" * 2_000_000: 1}}, "has a token of 2,000,000 characters"),
        ({"type": "WordPiece", "continuing_subword_prefix": "#" * 10**6, "max_input_chars_per_word": 100}, "prefix"),
    ],
)
def test_tokens_beyond_all_use(home, table, change, words):
    assert words in told(home, table | {"model": table["model"] | change})


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
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(["[UNK]", "[CLS]", "[SEP]", "a" * 20_000]))
    assert "has a token of 20,000 characters" in outcome(tmp_path, "convert", "gpt2", "out2")
