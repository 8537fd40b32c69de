"""The string form of patterns: what is read, what is refused, and in which words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import schema as parts
from regard.core import Pattern, UserError, part
from regard.parts.patterns.causal import Causal
from regard.parts.patterns.window import Window
from regard.pattern.analysis import first_blind_query, pairs

parse = Pattern.parse

WRONG = [
    ("windo(3)", ["unknown pattern 'windo'", "did you mean 'window'"]),
    ("causal & windows(3)", ["'windows'", "did you mean 'window'"]),
    ("window(sise=3)", ["window has no 'sise'", "did you mean 'size'"]),
    ("random_blocks(2, sed=3)", ["random_blocks has no 'sed'", "did you mean 'seed'"]),
    ("window(3, 4, 5)", ["window takes at most 2 (size, ahead), not 3"]),
    ("window(3, size=3)", ["window is given 'size' twice"]),
    ("window", ["window needs 'size'", "whole number"]),
    ("window(0)", ["window.size must be at least 1, not 0"]),
    ("window(4, -1)", ["window.ahead must be at least 0, not -1"]),
    ("window(2.5)", ["window.size must be a whole number, not 2.5"]),
    ("window(True)", ["window.size must be a whole number, not True"]),
    ("window('3')", ["window.size must be a whole number, not '3'"]),
    ("window(causal)", ["window.size must be a whole number"]),
    ("window(99999999999)", ["too large"]),
    ("causal(3)", ["causal takes no arguments, not 1"]),
    ("causal and first(2)", ["write '&' instead of 'and'"]),
    ("causal or first(2)", ["write '|' instead of 'or'"]),
    ("not causal", ["write '~' instead of 'not'"]),
    ("causal + first(2)", ["'causal + first(2)' is not a pattern"]),
    ("causal & 3", ["'3' is not a pattern"]),
    ("causal &", ["cannot be read"]),
    ("causal & (window(3)", ["cannot be read at column"]),
    ("", ["empty", "causal"]),
    ("   ", ["empty"]),
    ("window(*(3,))", ["stars are not understood"]),
    ("window(**{})", ["stars are not understood"]),
    ("first.count", ["'first.count' is not a pattern"]),
    ("__import__('os').system('true')", ["is not a pattern"]),
    ("(lambda: causal)()", ["is not a pattern"]),
    ("last(5, 3)", ["the last 5 positions of a sequence of 3"]),
    ("fixed(8, 3, 4)", ["4 turns of 3 columns do not fit into a block of 8"]),
    ("dilated(3)", ["dilated needs 'rate'"]),
    ("stride(0)", ["stride.every must be at least 1"]),
    ("random_blocks(257)", ["random_blocks.count must be at most 256"]),
    ("random_blocks(1, of=0)", ["random_blocks.of must be at least 1"]),
    ("global_tokens", ["needs a count or positions"]),
    ("global_tokens(at=3)", ["lists positions"]),
    ("global_tokens(at=(1, -2))", ["at least 0, not -2"]),
    ("heads()", ["at least one pattern"]),
    ("heads(3)", ["heads takes patterns, not 3"]),
    ("heads(each=causal)", ["without names"]),
    ("heads(causal, windo(3))", ["did you mean 'window'"]),
    ("segment(3)", ["belongs in a call"]),
    ("padding(3)", ["belongs in a call"]),
    ("matrix(3)", ["a tensor or the path of a file, not 3"]),
    ("matrix(adjacency.npy)", ["quotes"]),
    ("matrix('nowhere.npy')", ["nowhere.npy", "No such file"]),
    ("matrix('weights.pt')", [".npy or .safetensors", "weights.pt"]),
    ("causal" + " | causal" * 200, ["more than 150 operators"]),
    ("~" * 200 + "causal", ["more than 150 operators"]),
    ("(" * 300 + "causal" + ")" * 300, ["cannot be read"]),
    ("window(0x" + "f" * 9000 + ")", ["too large"]),
    ("window(-0x" + "f" * 9000 + ")", ["too large"]),
    ("causal\0", ["cannot be read"]),
    ("\ud800", ["cannot be read"]),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=lambda value: repr(value)[:40] if isinstance(value, str) else "")
def test_wrong_text(text, said):
    with pytest.raises(UserError) as caught:
        parse(text)
    for words in said:
        assert words in str(caught.value)
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)


PIECES = st.sampled_from(
    [
        *("causal", "window", "heads", "first", "matrix", "global_tokens", "fixed", "prefix", "segment", "nothing"),
        *("(", ")", ",", "=", "&", "|", "~", "-", ".", "[", "]", "*", "size", "count", "at", " ", "\n", "\\", "#"),
        *(
            "0",
            "1",
            "3",
            "2.5",
            "1e999",
            "3j",
            "None",
            "True",
            "'a.npy'",
            '"',
            "b'x'",
            "...",
            "if",
            "lambda",
            ":",
            "f'{",
        ),
    ]
)


@given(st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join), st.lists(PIECES, max_size=12).map(" ".join)))
@settings(max_examples=1500, deadline=None, derandomize=True)
def test_any_text_is_read_or_refused(text):
    try:
        pattern = parse(text)
    except UserError:
        return
    assert parse(str(pattern)) == pattern


@pytest.mark.parametrize(
    "text",
    [
        "causal & (window(256) | stride(64) | first(4))",
        "causal & (window(3) & first(2))",
        "causal | (window(3) | first(2))",
        "~(causal & first(2)) | ~window(3)",
        "(causal | first(2)) & window(3)",
        "random_blocks(2, seed=3)",
        "random_blocks(2, 32, of=100)",
        "window(4, 0)",
        "global_tokens(at=(17,))",
        "heads(window(8), causal & stride(8), fixed(8, 2, 2))",
    ],
)
def test_written_as_read(text):
    assert str(parse(text)) == text


def test_other_spellings():
    assert parse(" causal&window( size = 3 ) ") == Causal() & Window(3)
    assert parse("(causal &\n window(3, ahead=None))") == Causal() & Window(3)
    assert parse("causal()") == Causal()
    assert parse("~~causal") == Causal()
    assert parse("global_tokens(at=[3, 5])") == parse("global_tokens(at=(3, 5))")
    assert part(Pattern, {"part": "heads", "each": ["window(8)", "stride(8)"]}) == parse("heads(window(8), stride(8))")


def test_a_pattern_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "user_folders", [tmp_path])
    head = "from dataclasses import dataclass\nfrom regard.core import Pattern\n\n"
    body = "class Odd_Ones(Pattern):\n    every: int = 2\n\n    def allows(self, query_at, key_at):\n"
    body += "        return key_at % self.every == 1\n"
    (tmp_path / "odd_ones.py").write_text(head + "@dataclass(frozen=True)\n" + body.replace("Odd_Ones", "OddOnes"))
    (tmp_path / "thawed.py").write_text(head + "@dataclass\n" + body.replace("Odd_Ones", "Thawed"))
    (tmp_path / "bare.py").write_text(head + "class Bare(Pattern):\n    pass\n")
    pattern = parse("odd_ones(3)")
    assert str(pattern) == "odd_ones(3)"
    assert pairs(pattern, 9) == 9 * 3  # although it does not give the full shape
    assert first_blind_query(parse("odd_ones"), 5) is None
    with pytest.raises(UserError, match="frozen=True"):
        parse("thawed(3)")
    with pytest.raises(UserError, match="does not define allows"):
        parse("bare")
