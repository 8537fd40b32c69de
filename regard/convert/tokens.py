"""Read the tokenizer of a folder in the Hugging Face layout, in any of its forms, and its special tokens ("marks").

tokenizer.json                      taken as it is
vocab.txt                           WordPiece, as BERT's
vocab.json and merges.txt           byte-level BPE, as GPT-2's, or with a suffix at the ends of words, as CLIP's
spiece.model, tokenizer.model       SentencePiece, as T5's; source.spm, target.spm and vocab.json: as Marian's
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from regard.core import UserError
from regard.data.tame import check_growth
from regard.data.tokenizer import Marks, Tokenizer
from regard.errors import in_one_line, short
from regard.files.reading import read_json

from . import spm, unigram
from .folder import Config as Schema
from .folder import Folder

Config = dict[str, Any]
WORD_END = "</w>"  # suffix of a piece that ends a word
CLIP_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"  # in CLIP


def marks_of(folder: Folder, config: Config) -> Marks:
    """Return the ids of special tokens: start, end, pad, a token that every answer is forced to begin with, and tokens
    that must never be generated (Marian's padding); None: config.json names none. Where several tokens end a text, the
    others are `ends`."""
    settings = config | folder.table("generation_config.json", Schema)
    text = settings.get("text_config") if isinstance(settings.get("text_config"), dict) else {}

    def number(*names: str) -> int | None:
        for name in names:
            value = settings.get(name, text.get(name))
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        return None

    both = bool(settings.get("is_encoder_decoder"))
    start = number("decoder_start_token_id", "bos_token_id") if both else number("bos_token_id")
    forced = number("forced_bos_token_id") if both else None
    alone = [ids[0] for ids in settings.get("bad_words_ids") or [] if isinstance(ids, list) and len(ids) == 1]
    never = [one for one in alone if isinstance(one, int) and one >= 0]
    marks = {"start": start, "end": number("eos_token_id"), "pad": number("pad_token_id"), "forced": forced}
    several = settings.get("eos_token_id")
    ends = [one for one in several[1:] if isinstance(one, int) and one >= 0] if isinstance(several, list) else []
    return marks | ({"never": never} if never else {}) | ({"ends": ends} if ends else {})


def tokenizers_of(folder: Folder, config: Config) -> list[Tokenizer]:
    """Return one tokenizer for both sides, or the source's and the target's, or none when there is none that can be
    read."""
    marks = marks_of(folder, config)
    try:
        settings, more = folder.table("tokenizer_config.json"), folder.table("added_tokens.json")
        found = _inner(folder.path, settings, config.get("model_type"))
        if not (folder.path / "tokenizer.json").is_file():
            found = [_with_added_tokens(inner, settings, more) for inner in found]
            for inner in found:
                check_growth(json.loads(inner.to_str()))
        return [Tokenizer(inner, marks) for inner in found]
    except UserError:
        raise
    except BaseException as error:  # a panic of the library is not even an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(f"the tokenizer of {short(folder.path)} cannot be read: {in_one_line(error)}") from None


def _inner(path: Path, settings: Config, kind: str | None) -> list[tokenizers.Tokenizer]:
    if (path / "tokenizer.json").is_file():
        return [Tokenizer.load_inner(path / "tokenizer.json")]
    if (path / "source.spm").is_file() and (path / "target.spm").is_file():
        numbers = read_json(path / "vocab.json")
        return [unigram.from_marian(spm.read(path / f"{side}.spm"), numbers) for side in ("source", "target")]
    if (path / "vocab.txt").is_file():
        return [_wordpiece(path / "vocab.txt", settings)]
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        ending = any(name.endswith(WORD_END) for name in read_json(path / "vocab.json"))
        return [_clip_bpe(path) if ending else _byte_level(path, settings)]
    for name in ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model"):
        if (path / name).is_file():
            return [unigram.from_sentencepiece(path / name, kind, settings)]
    return []


def _with_added_tokens(inner: tokenizers.Tokenizer, settings: Config, more: dict[str, int]) -> tokenizers.Tokenizer:
    """Add the tokens that were added to a vocabulary later, with the ids that the files give them."""
    listed = {number: name for name, number in more.items()}
    special = set()
    for number, token in (settings.get("added_tokens_decoder") or {}).items():
        listed[int(number)] = token["content"]
        special |= {token["content"]} if token.get("special") else set()
    for number, name in sorted(listed.items()):
        if inner.token_to_id(name) is None:
            inner.add_special_tokens([name]) if name in special else inner.add_tokens([name])
        if inner.token_to_id(name) != number:
            raise UserError(f"the added token {name} should be number {number}, and becomes {inner.token_to_id(name)}")
    return inner


def _wordpiece(path: Path, settings: Config) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordPiece.from_file(str(path), unk_token="[UNK]"))
    lower = bool(settings.get("do_lower_case", True))
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=lower,
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    names = [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if inner.token_to_id(name) is not None]
    inner.add_special_tokens(names)
    first, last = inner.token_to_id("[CLS]"), inner.token_to_id("[SEP]")
    if first is not None and last is not None:
        inner.post_processor = processors.BertProcessing(("[SEP]", last), ("[CLS]", first))
    return inner


def _byte_level(path: Path, settings: Config) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt")))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space", False)))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([name for name in ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>",
                                                "<|startoftext|>") if inner.token_to_id(name) is not None])  # fmt: skip
    first, last = inner.token_to_id("<s>"), inner.token_to_id("</s>")
    if first is not None and last is not None:
        inner.post_processor = processors.RobertaProcessing(("</s>", last), ("<s>", first), add_prefix_space=False)
    else:
        inner.post_processor = processors.ByteLevel(trim_offsets=False)
    return inner


def _clip_bpe(path: Path) -> tokenizers.Tokenizer:
    """Build CLIP's tokenizer: lowercase, with a suffix on the last piece of a word."""
    first, last = "<|startoftext|>", "<|endoftext|>"
    files = str(path / "vocab.json"), str(path / "merges.txt")
    inner = tokenizers.Tokenizer(models.BPE.from_file(*files, end_of_word_suffix=WORD_END, unk_token=last))
    small = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    inner.normalizer = normalizers.Sequence(small)
    words = pre_tokenizers.Split(Regex(CLIP_WORDS), behavior="removed", invert=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([first, last])
    ends = [(name, inner.token_to_id(name)) for name in (last, first)]
    inner.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=False, trim_offsets=False)
    return inner
