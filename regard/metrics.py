"""Metrics of answers: sacreBLEU's scores with their signatures, exact match, error rates, correlations and F1.

    exact           the share of answers that equal one of their references; for labels it is called accuracy
    f1              the mean over labels (macro) of 2 hits / (predictions of the label + references with it)
    sequence_error  1 - exact: the word error rate, where an answer is the pronunciation of a word
    pearson         100 times the correlation of answers that are numbers with their references
    spearman        the same of their ranks, with ties averaged
    tag_accuracy    the share of words with the right tag
    span_f1         2 hits / (predicted spans + spans of the references), of tags such as B-PER I-PER O: a hit has the
                    same words and the same type
    bits_per_character, bits_per_byte
                    -log2 p of a whole text per character, or per byte of UTF-8, which compares language models with
                    different tokenizers; only where tokenizing is lossless: nothing is unknown or lowercased
    token_error     the edit distance to the nearest reference per token of it: word or phoneme error rate

BLEU, chrF and TER: Post 2018, "A Call for Clarity in Reporting BLEU Scores", arXiv:1804.08771. Spans: Tjong Kim
Sang & De Meulder 2003, "Introduction to the CoNLL-2003 Shared Task", arXiv:cs/0306050.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.core import UserError
from regard.data.conll import parse_tags
from regard.errors import in_one_line, nearest

TEXT_METRICS = ("bleu", "chrf", "ter", "exact", "token_error", "sequence_error")  # of answers that are texts
ANSWER_METRICS = (*TEXT_METRICS, "accuracy", "f1", "pearson", "spearman", "tag_accuracy", "span_f1")
BITS = ("bits_per_character", "bits_per_byte")  # of language models
OTHER_METRICS = ("loss", "perplexity", "next_sentence", *BITS)  # measured without answers
HIGHER_IS_BETTER = {*ANSWER_METRICS, "next_sentence"} - {"ter", "token_error", "sequence_error"}
HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
SUBWORD_MARK = re.compile(r"@@( |$)")  # "pul@@ ley": subwords, as subword-nmt writes them
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff]")  # Thai, Lao, Burmese, Khmer, kana


class Score(NamedTuple):
    name: str
    value: float  # percent
    signature: str = ""  # sacreBLEU's, of all that a score depends on


def check(names: Sequence[str], known: Sequence[str] = ANSWER_METRICS) -> None:
    """Refuse metrics that are not among the known ones, before any long work."""
    for name in names:
        if name in known:
            continue
        if name in (*ANSWER_METRICS, *OTHER_METRICS):
            raise UserError(f"the metric '{name}' means nothing for this model: those that do are {', '.join(known)}")
        raise UserError(f"unknown metric '{name}'{nearest(name, known)}")


def measure(
    names: Sequence[str],
    answers: Sequence[str],
    references: Sequence[Sequence[str]],
    tokenize: str | None = None,
    lowercase: bool = False,
) -> list[Score]:
    """Return the scores of answers. Subwords (pul@@ ley) are joined first.

    references: for each answer one or several texts that count as right.
    tokenize:   sacreBLEU's tokenizer for BLEU: 13a, zh, char, intl, ..., or none for tokenized text; None: zh or char
                for references without spaces between words, none for references in subwords, else 13a.
    lowercase:  ignore case.
    """
    check(names)
    if len(answers) != len(references):
        raise UserError(f"{len(answers)} answers cannot be compared with {len(references)} references")
    if not answers:
        raise UserError("there is nothing to evaluate: the data has no example")
    if not all(references):
        raise UserError(f"answer {[bool(refs) for refs in references].index(False) + 1} has no reference")
    if lowercase:
        answers, references = [a.lower() for a in answers], [[r.lower() for r in refs] for refs in references]
    tokenize = tokenize or tokenizer_for(references)
    answers, references = [join_subwords(a) for a in answers], [[join_subwords(r) for r in refs] for refs in references]
    return [_one(name, answers, references, tokenize, lowercase) for name in names]


def _one(
    name: str, answers: Sequence[str], references: Sequence[Sequence[str]], tokenize: str, lowercase: bool
) -> Score:
    if name in ("exact", "accuracy", "sequence_error"):
        right = 100 * sum(answer in refs for answer, refs in zip(answers, references, strict=True)) / len(answers)
        return Score(name, 100 - right if name == "sequence_error" else right)
    if name in OWN_METRICS:
        return Score(name, 100 * OWN_METRICS[name](answers, references))
    metric = _sacre(name, tokenize, lowercase)
    most = max(len(refs) for refs in references)
    columns = [[refs[i] if i < len(refs) else None for refs in references] for i in range(most)]
    value = metric.corpus_score(list(answers), columns).score
    return Score(name, value, str(metric.get_signature()))


def _sacre(name: str, tokenize: str, lowercase: bool) -> Any:
    import sacrebleu  # imported here because it is slow to import

    if name == "chrf":
        return sacrebleu.CHRF(lowercase=lowercase)
    if name == "ter":
        return sacrebleu.TER()
    known = list(sacrebleu.BLEU.TOKENIZERS)
    if tokenize not in known:
        raise UserError(f"unknown BLEU tokenizer '{tokenize}'{nearest(tokenize, known)}")
    try:
        return sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    except Exception as error:  # some need more packages, or a network
        raise UserError(f"the BLEU tokenizer '{tokenize}' cannot be used here: {in_one_line(error)}") from None


def tokenizer_for(references: Sequence[Sequence[str]]) -> str:
    """Return the BLEU tokenizer that suits the script of the first hundred references."""
    if any(SUBWORD_MARK.search(refs[0]) for refs in references[:100]):
        return "none"
    sample = "".join("".join(refs[0].split()) for refs in references[:100])
    han, unspaced = len(HAN.findall(sample)), len(UNSPACED.findall(sample))
    if 2 * (han + unspaced) < len(sample) or not sample:
        return "13a"
    return "char" if 5 * unspaced > han else "zh"


def join_subwords(text: str) -> str:
    """Join subwords: "pul@@ ley" -> "pulley"."""
    return SUBWORD_MARK.sub("", text)


def token_error(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the errors per whitespace-separated token of the references; it may exceed 1."""
    errors = total = 0
    for answer, refs in zip(answers, references, strict=True):
        said = answer.split()
        distance, length = min((edit_distance(said, ref), len(ref)) for ref in (ref.split() for ref in refs))
        errors, total = errors + distance, total + length
    return errors / max(total, 1)


def f1(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the macro F1, from 0 to 1. Only the first reference counts."""
    right = [refs[0] for refs in references]
    said, asked = Counter(answers), Counter(right)
    hits = Counter(answer for answer, label in zip(answers, right, strict=True) if answer == label)
    labels = said.keys() | asked.keys()
    return sum(2 * hits[label] / (said[label] + asked[label]) for label in labels) / len(labels)


def edit_distance(one: Sequence, two: Sequence) -> int:
    """Return the Levenshtein distance: insertions, deletions and replacements."""
    if one == two:
        return 0
    row = list(range(len(two) + 1))
    for i, x in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(two, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def pearson(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the Pearson correlation, from -1 to 1; 0 where all answers are equal."""
    return _correlation(*_numbers(answers, references))


def spearman(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    return _correlation(*map(_ranks, _numbers(answers, references)))


def _numbers(answers: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
    try:
        return np.array([float(one) for one in answers]), np.array([float(refs[0]) for refs in references])
    except ValueError as error:
        raise UserError(f"a correlation is of numbers: {in_one_line(error)}") from None


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _correlation(one: np.ndarray, two: np.ndarray) -> float:
    one, two = one - one.mean(), two - two.mean()
    length = float(np.sqrt((one @ one) * (two @ two)))
    return float(one @ two) / length if length else 0.0


def tag_accuracy(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the share of the words of all texts that have the right tag."""
    pairs = [pair for said, right in _tags(answers, references) for pair in zip(said, right, strict=True)]
    return sum(said == right for said, right in pairs) / max(len(pairs), 1)


def span_f1(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the micro F1 of spans, from 0 to 1."""
    hits = total = asked = 0
    for said, right in _tags(answers, references):
        one, two = spans(said), spans(right)
        hits, total, asked = hits + len(one & two), total + len(one) + len(two), asked + len(two)
    if not asked:
        raise UserError("span_f1 is for tags such as B-PER, I-PER and O, and none of the right ones begins a span")
    return 2 * hits / total


def spans(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return the spans of a tagged sentence as (type, first word, word after the last). A span ends where the next word
    is outside, has another type, or begins a new span (B, S, U), and after E, L, S, U."""
    found, begin, kind = set(), 0, ""
    for at, tag in enumerate([*tags, "O"]):
        place, dash, new = tag.partition("-")
        new = new if dash else ""
        if kind and (new != kind or place in ("B", "S", "U") or tags[at - 1].partition("-")[0] in ("E", "L", "S", "U")):
            found.add((kind, begin, at))
            kind = ""
        if new and not kind:
            begin, kind = at, new
    return found


def _tags(answers: Sequence[str], references: Sequence[Sequence[str]]) -> Iterator[tuple[list[str], list[str]]]:
    for number, (answer, refs) in enumerate(zip(answers, references, strict=True), 1):
        said, right = parse_tags(answer), parse_tags(refs[0])
        if len(said) != len(right):
            raise UserError(f"answer {number} has {len(said)} tags, and there are {len(right)} words")
        yield said, right


OWN_METRICS = {  # from 0 to 1, by name
    "f1": f1, "token_error": token_error, "pearson": pearson, "spearman": spearman, "tag_accuracy": tag_accuracy,
    "span_f1": span_f1,
}  # fmt: skip
