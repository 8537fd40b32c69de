"""Build tokenizers from SentencePiece unigram pieces, with each family's ids and special tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from regard.core import UserError
from regard.errors import short

from . import spm

FOREIGN = "\0"  # prefix of pieces that only the other side's model has; no text contains it
LANGUAGE = re.compile(r">>.+<<")  # the target language with which a source of a multilingual Marian model begins
UNKNOWN = "\1"  # replaces unknown characters; no text contains it either
UNREACHABLE_SCORE = -1e9  # score of pieces that only the other side's model has
T5_SENTINELS = 100  # by default


class Layout(NamedTuple):
    """How a family arranges its vocabulary.

    single:  template of special tokens around one text.
    pair:    template of special tokens around two texts.
    first:   tokens that replace the first `dropped` pieces of the file.
    last:    tokens after the pieces.
    small:   whether letters are lowercased and lose their accents, by default.
    """

    single: str
    pair: str
    first: tuple[str, ...] = ()
    dropped: int = 0
    last: tuple[str, ...] = ()
    small: tuple[bool, bool] = (False, False)


LAYOUTS = {  # by model_type
    "t5": Layout("$A </s>", "$A </s> $B </s>"),
    "albert": Layout("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", small=(True, True)),
    "xlnet": Layout("$A <sep> <cls>:2", "$A <sep> $B:1 <sep>:1 <cls>:2", small=(False, True)),
    "xlm-roberta": Layout(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", ("<s>", "<pad>", "</s>", "<unk>"), 3, ("<mask>",)
    ),
    "camembert": Layout(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>",
        ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"), 1, ("<mask>",),
    ),
}  # fmt: skip


def from_sentencepiece(path: Path, kind: str | None, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """Build a tokenizer from a SentencePiece file. kind: model_type of config.json; settings: tokenizer_config.json."""
    found = spm.read(path)
    what = "of byte pairs" if not found.unigram else f"of a {kind}" if kind not in LAYOUTS else None
    if what is not None:
        raise UserError(
            f"{short(path)} is a SentencePiece model {what}, which regard does not read: save the tokenizer with "
            "transformers first, as tokenizer.json"
        )
    layout = LAYOUTS[str(kind)]
    more = int(settings.get("extra_ids", T5_SENTINELS) or 0) if kind == "t5" else 0
    last = (*layout.last, *(f"<extra_id_{more - 1 - i}>" for i in range(more)))
    kept = found.pieces[layout.dropped :]
    vocab = [(name, 0.0) for name in layout.first]
    vocab += [(piece.text, piece.score) for piece in kept] + [(name, 0.0) for name in last]
    unknown = next((i for i, (name, _) in enumerate(vocab) if name == "<unk>"), None)
    inner = _metaspace(models.Unigram(vocab, unk_id=unknown), found, _normalizers(layout, settings))
    marks = [piece.text for piece in kept if piece.kind in (spm.CONTROL, spm.UNKNOWN)]
    inner.add_special_tokens([*layout.first, *marks, *last])
    inner.add_special_tokens(
        [AddedToken(name, lstrip=True) for name in ("<mask>", "[MASK]") if inner.token_to_id(name)]
    )
    names = sorted(set(re.findall(r"[<\[][^ :]+", layout.pair)))
    if absent := [name for name in names if inner.token_to_id(name) is None]:
        raise UserError(f"{short(path)} has no piece {absent[0]}, which the tokenizer of a {kind} has")
    inner.post_processor = processors.TemplateProcessing(
        single=layout.single, pair=layout.pair, special_tokens=[(name, inner.token_to_id(name)) for name in names]
    )
    return inner


def from_marian(found: spm.Pieces, numbers: dict[str, int]) -> tokenizers.Tokenizer:
    """Build the tokenizer of one side of a Marian model: each side has its own pieces, and both share the ids."""
    scores = {piece.text: piece.score for piece in found.pieces if piece.kind in (spm.NORMAL, spm.USER)}
    names = sorted(numbers, key=numbers.__getitem__)
    if [numbers[name] for name in names] != list(range(len(names))) or "<unk>" not in numbers:
        raise UserError("vocab.json does not number its pieces from 0 on, '<unk>' among them")
    marks = [name for name in ("</s>", "<pad>", "<unk>") if name in numbers]
    languages = [name for name in names if LANGUAGE.fullmatch(name)]
    letters = set("".join(scores))
    kept = {*marks, *languages, *scores, *(name for name in names if letters.isdisjoint(name))}
    vocab = [(name if name in kept else FOREIGN + name, scores.get(name, UNREACHABLE_SCORE)) for name in names]
    inner = _metaspace(models.Unigram(vocab, unk_id=numbers["<unk>"]), found, after=[_merge_unknowns(letters)])
    inner.add_special_tokens(marks)
    inner.add_tokens([AddedToken(name, normalized=False) for name in languages])
    if "</s>" in numbers:
        inner.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", numbers["</s>"])]
        )
    return inner


def _normalizers(layout: Layout, settings: dict[str, Any]) -> list[Any]:
    """Return the normalizers of a layout that changes letters; such layouts also replace two quotes by one mark."""
    if not any(layout.small):
        return []
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not settings.get("keep_accents", not layout.small[1]):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    return steps + ([normalizers.Lowercase()] if settings.get("do_lower_case", layout.small[0]) else [])


def _merge_unknowns(letters: set[str]) -> normalizers.Replace:
    """Replace a run of characters that this side's model lacks by one unknown, even if the other side's model has
    them."""
    known = "".join(f"\\{c}" if c.isascii() and not c.isalnum() else c for c in sorted({*letters, " "}))
    return normalizers.Replace(tokenizers.Regex(f"[^{known}]{{2,}}"), UNKNOWN)


def _metaspace(
    model: models.Unigram, found: spm.Pieces, before: Sequence[Any] = (), after: Sequence[Any] = ()
) -> tokenizers.Tokenizer:
    """Build a tokenizer with normalizers before and after those of the model."""
    inner = tokenizers.Tokenizer(model)
    own = [normalizers.Precompiled(found.charsmap)] if found.charsmap else []
    spaces = [normalizers.Replace(tokenizers.Regex(" {2,}"), " "), normalizers.Strip()]
    inner.normalizer = normalizers.Sequence([*before, *own, *after, *spaces])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    back = [decoders.Replace(FOREIGN, ""), decoders.Metaspace(prepend_scheme="always")]
    inner.decoder = decoders.Sequence(back)
    return inner
