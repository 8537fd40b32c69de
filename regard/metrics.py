"""How good answers are: sacreBLEU's scores with their signatures, exact match, and errors per token and per sequence.

    exact           share of the answers that are one of their references; of labels it is called accuracy
    f1              the mean over all labels of 2 hits / (times it was said + times it was right)
    sequence_error  the rest: word error rate, where an answer is the pronunciation of a word
    token_error     edit distance to the nearest reference, per token of it: word or phoneme error rate

BLEU, chrF and TER: Post 2018, "A Call for Clarity in Reporting BLEU Scores", arXiv:1804.08771.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from regard.core import UserError
from regard.core.errors import in_one_line, nearest

KNOWN = ("bleu", "chrf", "ter", "exact", "token_error", "sequence_error", "accuracy", "f1")
HIGHER_IS_BETTER = {"bleu", "chrf", "exact", "accuracy", "f1"}
HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
MARKED = re.compile(r"@@( |$)")  # "pul@@ ley": pieces of a word, as subword-nmt writes them
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff]")  # Thai, Lao, Burmese, Khmer, kana


class Score(NamedTuple):
    name: str
    value: float  # percent
    signature: str = ""  # of sacreBLEU: all that a score depends on


def check(names: Sequence[str], known: Sequence[str] = KNOWN) -> None:
    """Before any long work."""
    for name in names:
        if name not in known:
            raise UserError(f"unknown metric '{name}'{nearest(name, known)}")


def measure(
    names: Sequence[str],
    answers: Sequence[str],
    references: Sequence[Sequence[str]],
    tokenize: str | None = None,
    lowercase: bool = False,
) -> list[Score]:
    """answers, and for each the references that count as right: one, or several.

    tokenize:  sacreBLEU's for BLEU: 13a, zh, char, intl, ..., or none for text that is tokenised already; None: zh or
               char for references without spaces between words, none for references in pieces (pul@@ ley), else 13a.
    lowercase: capitals do not matter.

    Words in pieces are joined first.
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
    answers, references = [whole(a) for a in answers], [[whole(r) for r in refs] for refs in references]
    return [_one(name, answers, references, tokenize, lowercase) for name in names]


def _one(
    name: str, answers: Sequence[str], references: Sequence[Sequence[str]], tokenize: str, lowercase: bool
) -> Score:
    if name == "f1":
        return Score(name, 100 * f1(answers, references))
    if name in ("exact", "accuracy", "sequence_error"):
        right = 100 * sum(answer in refs for answer, refs in zip(answers, references, strict=True)) / len(answers)
        return Score(name, 100 - right if name == "sequence_error" else right)
    if name == "token_error":
        return Score(name, 100 * token_error(answers, references))
    metric = _sacre(name, tokenize, lowercase)
    most = max(len(refs) for refs in references)
    columns = [[refs[i] if i < len(refs) else None for refs in references] for i in range(most)]
    value = metric.corpus_score(list(answers), columns).score
    return Score(name, value, str(metric.get_signature()))


def _sacre(name: str, tokenize: str, lowercase: bool) -> Any:
    import sacrebleu  # slow to import

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
    """The BLEU tokenizer that suits the script, by the first hundred references."""
    if any(MARKED.search(refs[0]) for refs in references[:100]):
        return "none"
    sample = "".join("".join(refs[0].split()) for refs in references[:100])
    han, unspaced = len(HAN.findall(sample)), len(UNSPACED.findall(sample))
    if 2 * (han + unspaced) < len(sample) or not sample:
        return "13a"
    return "char" if 5 * unspaced > han else "zh"


def whole(text: str) -> str:
    """Words in pieces joined: "pul@@ ley" -> "pulley"."""
    return MARKED.sub("", text)


def token_error(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """A share, of tokens between spaces; above 1 where there are more errors than tokens."""
    errors = total = 0
    for answer, refs in zip(answers, references, strict=True):
        said = answer.split()
        distance, length = min((edit_distance(said, ref), len(ref)) for ref in (ref.split() for ref in refs))
        errors, total = errors + distance, total + length
    return errors / max(total, 1)


def f1(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """A share; the first reference is the right one."""
    right = [refs[0] for refs in references]
    said, asked = Counter(answers), Counter(right)
    hits = Counter(answer for answer, label in zip(answers, right, strict=True) if answer == label)
    labels = said.keys() | asked.keys()
    return sum(2 * hits[label] / (said[label] + asked[label]) for label in labels) / len(labels)


def edit_distance(one: Sequence, two: Sequence) -> int:
    """Insertions, deletions and replacements that turn one into the other."""
    if one == two:
        return 0
    row = list(range(len(two) + 1))
    for i, x in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(two, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]
