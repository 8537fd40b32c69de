"""Metrics against their definitions and against sacreBLEU."""

import random

import pytest
import sacrebleu

from regard.core import UserError
from regard.metrics import edit_distance, measure, token_error, tokenizer_for

ANSWERS = ["the cat sat on the mat", "A dog barks loudly at night", "it rains"]
REFERENCES = [["the cat sat on a mat", "the cat was on the mat"], ["a dog barks loudly at night"], ["it rains"]]


def one(name: str, answers: list[str], references: list[list[str]], tokenize: str | None = None, lowercase=False):
    return measure([name], answers, references, tokenize, lowercase)[0]


def test_exact_match_and_sequence_error():
    assert one("exact", ANSWERS, REFERENCES).value == pytest.approx(100 / 3)
    assert one("sequence_error", ANSWERS, REFERENCES).value == pytest.approx(200 / 3)
    assert one("exact", ANSWERS, REFERENCES, lowercase=True).value == pytest.approx(200 / 3)


def test_any_reference_is_right():
    assert one("exact", ["b", "b"], [["a", "b"], ["a"]]).value == 50


def test_token_error_is_of_the_nearest_reference():
    """1 of 6 tokens is wrong, 1 of 6 ('A' is not 'a'), and 0 of 2."""
    assert one("token_error", ANSWERS, REFERENCES).value == pytest.approx(100 * 2 / 14)
    assert token_error(["a b"], [["a b c d e", "a x"]]) == pytest.approx(1 / 2)
    assert token_error(["a b c"], [["a"]]) == 2.0
    assert token_error([""], [["a b"]]) == 1.0
    assert token_error(["", "a"], [[""], ["a"]]) == 0.0


def recursive(one: str, two: str) -> int:
    if not one or not two:
        return len(one) + len(two)
    if one[0] == two[0]:
        return recursive(one[1:], two[1:])
    return 1 + min(recursive(one[1:], two), recursive(one, two[1:]), recursive(one[1:], two[1:]))


def test_edit_distance():
    dice = random.Random(3)
    for _ in range(200):
        words = ["".join(dice.choices("abc", k=dice.randrange(6))) for _ in range(2)]
        assert edit_distance(*words) == recursive(*words), words
    assert edit_distance("kitten", "sitting") == 3


def test_sacrebleu_is_what_it_is():
    columns = [["the cat sat on a mat", REFERENCES[1][0], "it rains"], ["the cat was on the mat", None, None]]
    bleu = sacrebleu.BLEU(tokenize="13a")
    found = one("bleu", ANSWERS, REFERENCES)
    assert found.value == pytest.approx(bleu.corpus_score(ANSWERS, columns).score)
    assert found.signature == str(bleu.get_signature())
    assert "nrefs:var" in found.signature
    for name, metric in (("chrf", sacrebleu.CHRF()), ("ter", sacrebleu.TER())):
        assert one(name, ANSWERS, REFERENCES).value == pytest.approx(metric.corpus_score(ANSWERS, columns).score)
    assert [s.name for s in measure(["ter", "bleu"], ANSWERS, REFERENCES)] == ["ter", "bleu"]


def test_text_that_is_tokenised_already():
    """The tokenizer 13a would split the comma from the word."""
    answers, references = ["a , b c d e"], [["a, b c d e"]]
    assert one("bleu", answers, references, "13a").value == pytest.approx(100)
    plain = one("bleu", answers, references, "none")
    assert plain.value < 90
    assert "tok:none" in plain.signature


def test_lowercase_is_in_the_signature():
    found = one("bleu", ANSWERS, REFERENCES, lowercase=True)
    assert "case:lc" in found.signature
    assert found.value > one("bleu", ANSWERS, REFERENCES).value
    assert "case:lc" in one("chrf", ANSWERS, REFERENCES, lowercase=True).signature


SCRIPTS = {
    "Ein Haus, ein Mond.": "13a",
    "猫坐在垫子上。": "zh",
    "これはペンです": "char",
    "แมวนั่ง": "char",
    "GPT 是猫": "13a",
    "": "13a",
}


@pytest.mark.parametrize(("text", "wanted"), SCRIPTS.items())
def test_scripts_without_spaces(text, wanted):
    assert tokenizer_for([[text]]) == wanted


def test_chinese_by_default():
    found = one("bleu", ["猫坐在垫子上"], [["猫坐在椅子上"]])
    assert "tok:zh" in found.signature
    assert 0 < found.value < 100


@pytest.mark.parametrize("name", ["bleu", "chrf", "ter", "exact", "token_error", "sequence_error"])
def test_empty_answers_and_references(name):
    """An empty answer is a wrong answer, not an error."""
    assert 0 <= one(name, ["", "a b"], [["x y", "z"], ["a b"]]).value <= 100
    assert one(name, ["", "a"], [[""], ["a"]]).value >= 0


def test_what_makes_no_sense_is_refused():
    for names, answers, references, words in (
        (["blue"], ["a"], [["a"]], "unknown metric 'blue'; did you mean 'bleu'?"),
        (["bleu"], ["a"], [["a"], ["b"]], "1 answers cannot be compared with 2 references"),
        (["bleu"], [], [], "nothing to evaluate"),
        (["exact"], ["a", "b"], [["a"], []], "answer 2 has no reference"),
    ):
        with pytest.raises(UserError) as told:
            measure(names, answers, references)
        assert words in str(told.value)
    with pytest.raises(UserError, match="unknown BLEU tokenizer '13b'; did you mean '13a'"):
        one("bleu", ANSWERS, REFERENCES, "13b")
    with pytest.raises(UserError, match="'ja-mecab' cannot be used here"):
        one("bleu", ANSWERS, REFERENCES, "ja-mecab")


def test_words_in_pieces_are_joined_first():
    """Subwords as subword-nmt writes them; such text is tokenized already."""
    answers, references = ["a pul@@ ley sys@@ tem (r@@ e@@"], [["a pulley system (re"]]
    assert [score.value for score in measure(["exact", "token_error"], answers, references)] == [100.0, 0.0]
    (score,) = measure(["bleu"], references[0], [answers])
    assert score.value == pytest.approx(100)
    assert "tok:none" in score.signature
