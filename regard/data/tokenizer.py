"""Encode text as token ids and decode it, with the `tokenizers` library.

    bpe, unigram      pieces of words, or of sentences where a script has no spaces; rare characters as their bytes, so
                      that any text is encoded without loss
    wordpiece         pieces of words, as in BERT
    characters, bytes one token each
    words             words and punctuation marks
    pretokenised      the text is split at spaces only

BPE: Sennrich et al. 2016, arXiv:1508.07909. Unigram: Kudo 2018, arXiv:1804.10959.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import tokenizers

from regard.core import UserError
from regard.errors import in_one_line, nearest, short
from regard.files.reading import Natural, read_text
from regard.machine import interruptible

from .pieces import BYTES, KINDS, NORMALIZERS, SPECIALS, WITH_BYTES, Kind, labels, normalizer_steps
from .tame import check_growth

BYTE_VALUES = {name: bytes([value]) for value, name in enumerate(BYTES)}

ROLES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<PAD>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>", "<UNK>", "<|endoftext|>"),
    "start": ("<s>", "[CLS]", "<bos>", "<|startoftext|>", "<|begin_of_text|>", "<|endoftext|>"),
    "end": ("</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
}


class Marks(TypedDict, total=False):
    """The ids of the special tokens of a converted model; None: it has no such token."""

    start: Natural | None
    end: Natural | None
    pad: Natural | None
    unk: Natural | None
    forced: Natural | None
    never: list[Natural]
    ends: list[Natural]


class Tokenizer:
    """A `tokenizers.Tokenizer` (as `inner`) with the ids of its pad, unknown, start and end tokens.

    marks:      the ids of the special tokens of a converted model; no token is added then.
    forced_bos: the token that every answer begins with, after the start; None: there is none.
    suppressed: tokens that are never generated.
    extra_ends: other tokens that end an answer.
    """

    def __init__(self, inner: tokenizers.Tokenizer, marks: Marks | None = None):
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True  # '<s>' in a text is text, not a special token
        self.inner = inner
        self.forced_bos: int | None = None if marks is None else marks.get("forced")
        self.suppressed: list[int] = [] if marks is None else marks.get("never", [])
        self.extra_ends: list[int] = [] if marks is None else marks.get("ends", [])
        if marks is None:
            self.pad, self.unk, self.start, self.end = (_find_or_add(inner, names) for names in ROLES.values())
        else:
            self.end = _find_special(inner, marks, "end", 0)
            self.pad, self.unk, self.start = (
                _find_special(inner, marks, role, self.end) for role in ("pad", "unk", "start")
            )
        self.size = max(inner.get_vocab().values()) + 1
        self.specials = {self.pad, self.unk, self.start, self.end}

    @classmethod
    def train(
        cls,
        kind: str,
        texts: Iterable[str],
        size: int | None = None,
        lowercase: bool = False,
        normalize: str = "none",
    ) -> Tokenizer:
        """Train a tokenizer. size: the most tokens, the four special ones included; None: the default. normalize: none,
        nfc, nfkc."""
        for what, word, known in (("tokenizer", kind, KINDS), ("normalize", normalize, NORMALIZERS)):
            if word not in known:
                raise UserError(f"unknown {what} '{word}'{nearest(str(word), known)}")
        chosen: Kind = KINDS[kind]
        size = chosen.default_size if size is None else size
        least = len(SPECIALS) + chosen.min_size
        if size < least and kind != "bytes":
            raise UserError(f"a tokenizer of {kind} needs a size of at least {least}, not {size}")
        try:
            return cls(interruptible(lambda: chosen.learn(texts, size, normalizer_steps(normalize, lowercase))))
        except BaseException as error:
            raise _user_error(error, f"no tokenizer of {kind} can be learned from this text") from None

    @classmethod
    def from_labels(cls, texts: Iterable[str], ordered: bool = False) -> Tokenizer:
        """Return a tokenizer of labels: every whole text is one token. ordered: ids follow the given order, not the
        alphabet."""
        return cls(labels(texts, ordered))

    @classmethod
    def load(cls, path: str | Path, marks: Marks | None = None) -> Tokenizer:
        """Load a tokenizer.json. Special tokens that it lacks are added, unless `marks` is given."""
        inner = cls.load_inner(Path(path))
        try:
            return cls(inner, marks)
        except BaseException as error:
            raise _user_error(error, f"{short(path)} is no tokenizer") from None

    @staticmethod
    def load_inner(path: Path) -> tokenizers.Tokenizer:
        """Return the library's tokenizer of a tokenizer.json, after checking that it cannot blow up texts."""
        try:
            table = json.loads(read_text(path))
        except (ValueError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{short(path)} is no tokenizer, not even JSON: {in_one_line(error)}") from None
        try:
            check_growth(table)
            return tokenizers.Tokenizer.from_str(json.dumps(table))  # the table that was checked
        except UserError as error:
            raise error.of(short(path)) from None
        except BaseException as error:
            raise _user_error(error, f"{short(path)} is no tokenizer") from None

    def save(self, path: str | Path) -> None:
        """Write to a temporary name and rename, so that the file is never half-written."""
        path = Path(path)
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(self.inner.to_str(pretty=True), encoding="utf-8")
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise UserError(f"{short(path)} cannot be written: {error.strerror}") from None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        with _without_panic():
            try:
                found = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
            except TypeError:  # a lone surrogate is not text
                found = self.inner.encode_batch_fast(_without_lone_surrogates(texts), add_special_tokens=False)
        return [one.ids for one in found]

    def encode_with_special_tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text with the special tokens that the tokenizer adds, such as [CLS] and [SEP];
        where it adds none, with the end token."""
        if not self.adds_special_tokens:
            return [[*ids, self.end] for ids in self.encode(texts)]
        with _without_panic():
            return [
                one.ids
                for one in self.inner.encode_batch_fast(_without_lone_surrogates(texts), add_special_tokens=True)
            ]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Return the token ids of each pair as one sequence with special tokens, and their segment ids, 0 or 1."""
        if self.adds_special_tokens:
            both = [tuple(_without_lone_surrogates(pair)) for pair in pairs]
            with _without_panic():
                return [(one.ids, one.type_ids) for one in self.inner.encode_batch(both, add_special_tokens=True)]
        sides = (
            zip(*(self.encode_with_special_tokens(side) for side in zip(*pairs, strict=True)), strict=True)
            if pairs
            else ()
        )
        return [([*one, *two], [0] * len(one) + [1] * len(two)) for one, two in sides]

    @property
    def adds_special_tokens(self) -> bool:
        """Return whether the tokenizer has a template that adds special tokens, as BERT's does."""
        return self.inner.num_special_tokens_to_add(False) > 0

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text without special tokens. Bytes that form no character become \ufffd; those around them are
        kept."""
        kept = [i for i in map(int, ids) if i not in self.specials]
        if repr(self.inner.decoder) != repr(WITH_BYTES):
            with _without_panic():
                return self.inner.decode(kept, skip_special_tokens=True)
        names = (self.inner.id_to_token(i) or "" for i in kept)  # the library drops adjacent good bytes too
        return b"".join(BYTE_VALUES.get(name) or name.encode() for name in names).decode("utf-8", "replace")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return each token as readable text: special tokens by name, bytes of incomplete characters as \\xe4."""
        return [self._token(int(i)) for i in ids]

    def _token(self, i: int) -> str:
        name = self.inner.id_to_token(i)
        if name is None:
            return f"[{i}]"
        return ascii(BYTE_VALUES[name])[2:-1] if name in BYTE_VALUES else name

    @property
    def num_labels(self) -> int:
        """Return the number of labels of a tokenizer of labels."""
        return self.size - len(SPECIALS)

    def label_names(self) -> list[str]:
        """Return the labels of a tokenizer of labels, in the order of their ids."""
        known = self.inner.get_vocab()
        return sorted(known, key=known.__getitem__)[len(SPECIALS) :]

    def label_ids(self, labels: Sequence[str], unknown: int | None = None) -> list[int]:
        """Return the ids of labels, counted from 0. A label that this tokenizer of labels lacks gets the id `unknown`;
        None: it is refused."""
        known = {label: number for number, label in enumerate(self.label_names())}
        found = [known.get(label.strip(), unknown) for label in labels]
        if None in found:
            label = labels[found.index(None)].strip()
            near = nearest(label, self.label_names())
            raise UserError(f"the label '{label}' is none of those that were learned{near}")
        return [number for number in found if number is not None]

    def keeps_newlines(self) -> bool:
        """Return whether line ends are encoded as tokens, not dropped as whitespace."""
        return bool(self.encode(["\n"])[0])

    def hash(self) -> str:
        """Return a hash of the tokenizer."""
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()


def _without_lone_surrogates(texts: Iterable[str]) -> list[str]:
    """Return texts with lone surrogates replaced."""
    return [text.encode("utf-8", "replace").decode() for text in texts]


def _find_or_add(inner: tokenizers.Tokenizer, names: Sequence[str]) -> int:
    """Return the id of the first of these tokens that exists; if none does, the first is added."""
    there = next((name for name in names if inner.token_to_id(name) is not None), names[0])
    inner.add_special_tokens([there])
    found = inner.token_to_id(there)
    assert found is not None
    return found


def _find_special(inner: tokenizers.Tokenizer, marks: Marks, role: str, other: int) -> int:
    """Return the id in `marks`; else that of a token with a usual name for the role; else `other`."""
    given = marks.get(role)
    if given is not None and inner.id_to_token(given) is not None:
        return given
    found = (inner.token_to_id(name) for name in ROLES[role])
    return next((number for number in found if number is not None), other)


@contextmanager
def _without_panic() -> Iterator[None]:
    """Turn panics of the library into user errors. It panics when matching a pattern of a tokenizer.json takes too
    long."""
    try:
        yield
    except TypeError:
        raise
    except BaseException as error:
        raise _user_error(error, "the tokenizer cannot work on this text") from None


def _user_error(error: BaseException, what: str) -> BaseException:
    """Return a user error for an error of the library, whose panics are not even Exceptions."""
    if isinstance(error, UserError) or not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
        return error
    return UserError(f"{what}: {in_one_line(error)}")
