"""The tokenizer of a folder in the Hugging Face layout, whatever form it has there, and which of its tokens are marks.

tokenizer.json                      taken as it is
vocab.txt                           WordPiece, as BERT's
vocab.json and merges.txt           byte-level BPE, as GPT-2's, or with marks at the ends of words, as CLIP's
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
ENDING = "</w>"  # of a piece that ends a word
WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"  # in CLIP


def marks_of(folder: Folder, config: Config) -> Marks:
    """Which tokens start, end and pad, which one an answer is made to begin with, and which are never said (Marian's
    padding); None: nobody says. Where several end a text, the others are `ends`."""
    said = config | folder.table("generation_config.json", Schema)
    text = said.get("text_config") if isinstance(said.get("text_config"), dict) else {}

    def number(*names: str) -> int | None:
        for name in names:
            value = said.get(name, text.get(name))
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        return None

    both = bool(said.get("is_encoder_decoder"))
    start = number("decoder_start_token_id", "bos_token_id") if both else number("bos_token_id")
    forced = number("forced_bos_token_id") if both else None
    alone = [ids[0] for ids in said.get("bad_words_ids") or [] if isinstance(ids, list) and len(ids) == 1]
    never = [one for one in alone if isinstance(one, int) and one >= 0]
    marks = {"start": start, "end": number("eos_token_id"), "pad": number("pad_token_id"), "forced": forced}
    several = said.get("eos_token_id")
    ends = [one for one in several[1:] if isinstance(one, int) and one >= 0] if isinstance(several, list) else []
    return marks | ({"never": never} if never else {}) | ({"ends": ends} if ends else {})


def tokenizers_of(folder: Folder, config: Config) -> list[Tokenizer]:
    """One for both sides, or the source's and the target's, or none when nothing there can be read."""
    marks = marks_of(folder, config)
    try:
        said, more = folder.table("tokenizer_config.json"), folder.table("added_tokens.json")
        found = _inner(folder.path, said, config.get("model_type"))
        if not (folder.path / "tokenizer.json").is_file():
            found = [_with_more(inner, said, more) for inner in found]
            for inner in found:
                check_growth(json.loads(inner.to_str()))
        return [Tokenizer(inner, marks) for inner in found]
    except UserError:
        raise
    except BaseException as error:  # a panic of the library is not even an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(f"the tokenizer of {short(folder.path)} cannot be read: {in_one_line(error)}") from None


def _inner(path: Path, said: Config, kind: str | None) -> list[tokenizers.Tokenizer]:
    if (path / "tokenizer.json").is_file():
        return [Tokenizer.load_inner(path / "tokenizer.json")]
    if (path / "source.spm").is_file() and (path / "target.spm").is_file():
        numbers = read_json(path / "vocab.json")
        return [unigram.of_two(spm.read(path / f"{side}.spm"), numbers) for side in ("source", "target")]
    if (path / "vocab.txt").is_file():
        return [_wordpiece(path / "vocab.txt", said)]
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        ending = any(name.endswith(ENDING) for name in read_json(path / "vocab.json"))
        return [_ended_words(path) if ending else _byte_level(path, said)]
    for name in ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model"):
        if (path / name).is_file():
            return [unigram.one_side(path / name, kind, said)]
    return []


def _with_more(inner: tokenizers.Tokenizer, said: Config, more: dict[str, int]) -> tokenizers.Tokenizer:
    """With the tokens that were added to a vocabulary later, as the files beside it number them."""
    listed = {number: name for name, number in more.items()}
    special = set()
    for number, token in (said.get("added_tokens_decoder") or {}).items():
        listed[int(number)] = token["content"]
        special |= {token["content"]} if token.get("special") else set()
    for number, name in sorted(listed.items()):
        if inner.token_to_id(name) is None:
            inner.add_special_tokens([name]) if name in special else inner.add_tokens([name])
        if inner.token_to_id(name) != number:
            raise UserError(f"the added token {name} should be number {number}, and becomes {inner.token_to_id(name)}")
    return inner


def _wordpiece(path: Path, said: Config) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordPiece.from_file(str(path), unk_token="[UNK]"))
    lower = bool(said.get("do_lower_case", True))
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=lower,
        strip_accents=said.get("strip_accents"),
        handle_chinese_chars=bool(said.get("tokenize_chinese_chars", True)),
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    names = [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if inner.token_to_id(name) is not None]
    inner.add_special_tokens(names)
    first, last = inner.token_to_id("[CLS]"), inner.token_to_id("[SEP]")
    if first is not None and last is not None:
        inner.post_processor = processors.BertProcessing(("[SEP]", last), ("[CLS]", first))
    return inner


def _byte_level(path: Path, said: Config) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt")))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(said.get("add_prefix_space", False)))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([name for name in ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>",
                                                "<|startoftext|>") if inner.token_to_id(name) is not None])  # fmt: skip
    first, last = inner.token_to_id("<s>"), inner.token_to_id("</s>")
    if first is not None and last is not None:
        inner.post_processor = processors.RobertaProcessing(("</s>", last), ("<s>", first), add_prefix_space=False)
    else:
        inner.post_processor = processors.ByteLevel(trim_offsets=False)
    return inner


def _ended_words(path: Path) -> tokenizers.Tokenizer:
    """CLIP's: small letters, and the last piece of a word says that it is."""
    first, last = "<|startoftext|>", "<|endoftext|>"
    files = str(path / "vocab.json"), str(path / "merges.txt")
    inner = tokenizers.Tokenizer(models.BPE.from_file(*files, end_of_word_suffix=ENDING, unk_token=last))
    small = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    inner.normalizer = normalizers.Sequence(small)
    words = pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([first, last])
    ends = [(name, inner.token_to_id(name)) for name in (last, first)]
    inner.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=False, trim_offsets=False)
    return inner
