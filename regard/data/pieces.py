"""Train each kind of tokenizer. The same texts give the same tokenizer, except for unigram, whose probabilities the
library sums in no fixed order.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from regard.core import UserError

SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")  # 0, 1, 2, 3
NORMALIZERS = {"none": None, "nfc": normalizers.NFC, "nfkc": normalizers.NFKC}
# Scripts without spaces between words, and their punctuation.
UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\u3000-\u303f\uff00-\uffef]"
# Letters, digits, punctuation and spaces are split (Radford et al. 2019), so that no piece is '<s>' or '<0x41>'.
WORD_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GROUPS = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
WITH_BYTES = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
WORD = "\u2581"  # marks the beginning of a word while word pieces are learned

Inner = tokenizers.Tokenizer
Texts = Iterable[str]


def normalizer_steps(normalize: str, lowercase: bool) -> list[Any]:
    form = NORMALIZERS[normalize]
    return ([form()] if form else []) + ([normalizers.Lowercase()] if lowercase else [])


def _new(model: Any, steps: list[Any], before: Any = None, decoder: Any = None) -> Inner:
    inner = tokenizers.Tokenizer(model)
    if steps:
        inner.normalizer = normalizers.Sequence(steps)
    if before is not None:
        inner.pre_tokenizer = before
    if decoder is not None:
        inner.decoder = decoder
    return inner


def _add_special_tokens(inner: Inner) -> Inner:
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return inner


def _make_vocab(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate((*SPECIALS, *names))}


def _with_bytes(model: Any, steps: list[Any]) -> Inner:
    """Return a tokenizer that encodes unknown characters as their bytes, and decodes them."""
    return _new(model, steps, GROUPS, WITH_BYTES)


def _table(inner: Inner) -> dict[str, Any]:
    return json.loads(inner.to_str())["model"]


def _frequent_characters(counts: Counter[str], size: int) -> list[str]:
    """Return the characters that get their own token: the most frequent ones that occur more than once."""
    ranked = sorted((letter for letter in counts if counts[letter] > 1), key=lambda letter: (-counts[letter], letter))
    return sorted(ranked[: size - len(SPECIALS) - len(BYTES)])


def _bpe(texts: Texts, size: int, steps: list[Any]) -> Inner:
    counts: Counter[str] = Counter()
    learner = _new(models.BPE(), steps, GROUPS)
    trainer = trainers.BpeTrainer(vocab_size=size + size // 4, min_frequency=2, show_progress=False)
    learner.train_from_iterator(_count_characters(texts, counts, steps), trainer)
    letters = _frequent_characters(counts, size)
    left = size - len(SPECIALS) - len(BYTES) - len(letters)
    merges = [(one, other) for one, other in _table(learner)["merges"]][:left]
    vocab = _make_vocab(dict.fromkeys((*BYTES, *letters, *(one + other for one, other in merges))))
    return _add_special_tokens(_with_bytes(models.BPE(vocab, merges, byte_fallback=True), steps))


def _unigram(texts: Texts, size: int, steps: list[Any]) -> Inner:
    counts: Counter[str] = Counter()
    learner = _new(models.Unigram(), steps, GROUPS)
    trainer = trainers.UnigramTrainer(vocab_size=size, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    learner.train_from_iterator(_count_characters(texts, counts, steps), trainer)
    letters = set(_frequent_characters(counts, size))
    scored = [
        (piece, round(score, 6)) for piece, score in _table(learner)["vocab"][1:] if len(piece) > 1 or piece in letters
    ]
    scored.sort(key=lambda entry: (entry[0] not in letters, -entry[1], entry[0]))
    scored = scored[: size - len(SPECIALS) - len(BYTES)]
    worst = min((score for _, score in scored), default=0.0)
    vocab = [*((name, 0.0) for name in SPECIALS), *((name, worst) for name in BYTES), *scored]
    return _add_special_tokens(_with_bytes(models.Unigram(vocab, 1, True), steps))


def _bytes(texts: Texts, size: int, steps: list[Any]) -> Inner:
    inner = _with_bytes(models.BPE(_make_vocab(BYTES), [], byte_fallback=True), steps)
    inner.pre_tokenizer = None
    return _add_special_tokens(inner)


def _characters(texts: Texts, size: int, steps: list[Any]) -> Inner:
    counts: Counter[str] = Counter()
    for _ in _count_characters(texts, counts, steps):
        pass
    ranked = sorted(counts, key=lambda letter: (-counts[letter], letter))[: size - len(SPECIALS)]
    if not ranked:
        raise UserError("there is no text to take characters from")
    model = models.BPE(_make_vocab(sorted(ranked)), [], unk_token="<unk>")
    return _add_special_tokens(_new(model, steps, None, decoders.Fuse()))


def _wordpiece(texts: Texts, size: int, steps: list[Any]) -> Inner:
    """Use the merges of BPE as pieces, as the library's own WordPiece trainer orders them at random."""
    steps = [normalizers.BertNormalizer(strip_accents=False, lowercase=False), *steps]
    apart = pre_tokenizers.BertPreTokenizer()
    begun = pre_tokenizers.Metaspace(WORD, prepend_scheme="always", split=False)
    learner = _new(models.BPE(), steps, pre_tokenizers.Sequence([apart, begun]))
    counts: Counter[str] = Counter()
    trainer = trainers.BpeTrainer(vocab_size=2 * size, min_frequency=2, show_progress=False)
    learner.train_from_iterator(_count_characters(texts, counts, steps), trainer)
    learned = learner.get_vocab()
    letters = sorted((token for token in learned if len(token) == 1), key=lambda one: (-counts[one], one))
    pieces = [form for letter in letters if letter != WORD for form in _forms(letter)][: size // 2]
    merged = sorted((token for token in learned if len(token) > 1), key=learned.__getitem__)
    pieces += [token[1:] if token.startswith(WORD) else "##" + token for token in merged]
    kept = list(dict.fromkeys(pieces))[: size - len(SPECIALS)]
    return _add_special_tokens(
        _new(models.WordPiece(_make_vocab(kept), unk_token="<unk>"), steps, apart, _without_gaps(decoders.WordPiece()))
    )


def _forms(letter: str) -> tuple[str, ...]:
    """Return a character as the beginning of a word and as its continuation. A Chinese character is a word by
    itself."""
    return (letter,) if unicodedata.name(letter, "").startswith("CJK ") else (letter, "##" + letter)


def _count_characters(texts: Texts, counts: Counter[str], steps: list[Any]) -> Iterator[str]:
    """Yield the texts unchanged, and count their characters in passing."""
    normalize = normalizers.Sequence(steps).normalize_str if steps else str
    for text in texts:
        counts.update(normalize(text))
        yield text


def _words(texts: Texts, size: int, steps: list[Any]) -> Inner:
    apart = pre_tokenizers.Split(Regex(UNSPACED), "isolated")
    before = pre_tokenizers.Sequence([apart, pre_tokenizers.Whitespace()])
    spaced = decoders.WordPiece(prefix="  ", cleanup=False)  # no word has this prefix, so each gets a space before it
    return _train_words(texts, size, _new(models.WordLevel(unk_token="<unk>"), steps, before, _without_gaps(spaced)))


def _train_words(texts: Texts, size: int, inner: Inner) -> Inner:
    """Train on the most frequent words. A word that looks like a special token does not get its id."""
    inner.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=size, show_progress=False))
    ranked = inner.get_vocab()
    words = sorted(ranked.keys() - set(SPECIALS), key=ranked.__getitem__)[: size - len(SPECIALS)]
    inner.model = models.WordLevel(_make_vocab(words), unk_token="<unk>")
    return _add_special_tokens(inner)


def _without_gaps(decoder: Any) -> Any:
    """Return a decoder that also removes spaces between characters of scripts without spaces."""
    gap = decoders.Replace(Regex(rf"(?<={UNSPACED}) (?={UNSPACED})"), "")
    return decoders.Sequence([decoder, decoders.Fuse(), gap])


def _pretokenized(texts: Texts, size: int, steps: list[Any]) -> Inner:
    # A word that looks like a special token must not become one.
    marks = normalizers.Replace(Regex(r"(?<!\S)(<pad>|<s>|</s>)(?!\S)"), "<unk>")
    inner = _new(models.WordLevel(unk_token="<unk>"), [*steps, marks], pre_tokenizers.WhitespaceSplit())
    return _train_words(texts, size, inner)


def labels(texts: Texts, ordered: bool = False) -> Inner:
    """Return a tokenizer in which every whole text is one token. ordered: ids follow the given order, not the
    alphabet."""
    names = list(dict.fromkeys(text.strip() for text in texts))
    names = names if ordered else sorted(names)
    if len(names) < 2:
        raise UserError(f"labels need at least two, and there is only '{''.join(names)}'")
    return _add_special_tokens(_new(models.WordLevel(_make_vocab(names), unk_token="<unk>"), [normalizers.Strip()]))


class Kind(NamedTuple):
    learn: Callable[[Texts, int, list[Any]], Inner]
    default_size: int  # of the vocabulary
    min_size: int = 1  # of the vocabulary, special tokens not counted


KINDS = {
    "bpe": Kind(_bpe, 8000, 256),
    "unigram": Kind(_unigram, 8000, 256),
    "wordpiece": Kind(_wordpiece, 8000),
    "words": Kind(_words, 32000),
    "characters": Kind(_characters, 32000),
    "bytes": Kind(_bytes, 260, 256),
    "pretokenised": Kind(_pretokenized, 128000),
}
