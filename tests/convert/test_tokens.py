"""Tokenizers in older forms than tokenizer.json: numbers and marks as those of `transformers`."""

import json
import struct

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers

import regard
from regard.convert import convert
from regard.convert.folder import Folder
from regard.convert.tokens import tokenizers_of
from regard.core import UserError
from regard.decode import DecodeConfig

from .live import randomise

CONTROL, UNKNOWN = 3, 2
LETTERS = {"▁": -3.0, "a": -4.0, "b": -4.5, "c": -5.0, "▁a": -2.0, "bc": -2.5, "▁c": -3.5}


def message(pieces, unigram=True) -> bytes:
    """A SentencePiece file: (text, score, kind) each; nothing of it is longer than 127 bytes."""

    def field(number, data):
        return bytes([number << 3 | 2, len(data)]) + data

    def piece(text, score, kind):
        return field(1, text.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score) + bytes([3 << 3, kind])

    return b"".join(field(1, piece(*one)) for one in pieces) + field(2, bytes([3 << 3, 1 if unigram else 2]))


def marked(*marks):
    return [(name, 0.0, UNKNOWN if name == "<unk>" else CONTROL) for name in marks]


def plain(table=LETTERS):
    return [(text, score, 1) for text, score in table.items()]


# File, the marks in it, "  a   bc " and the pair "a", "c" as `transformers` numbers them, and one of the last tokens.
TWICE = ("<unk>", "<s>", "</s>")
SINGLE = {
    "t5": ("spiece.model", ("<pad>", "</s>", "<unk>"), [7, 3, 8, 1], [7, 1, 9, 1], ("<extra_id_0>", 109)),
    "xlm-roberta": ("sentencepiece.bpe.model", TWICE, [0, 8, 4, 9, 2], [0, 8, 2, 2, 10, 2], ("<mask>", 11)),
    "camembert": ("sentencepiece.bpe.model", TWICE, [5, 11, 7, 12, 6], [5, 11, 6, 6, 13, 6], ("<mask>", 14)),
    "albert": ("spiece.model", ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"), [2, 9, 5, 10, 3], [2, 9, 3, 11, 3],
               ("[MASK]", 4)),
    "xlnet": ("spiece.model", (*TWICE, "<cls>", "<sep>", "<pad>"), [10, 6, 11, 4, 3], [10, 4, 12, 4, 3], ("▁c", 12)),
}  # fmt: skip


def folder_of(path, config, **files) -> Folder:
    """With weights that nobody reads."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    torch.save({}, path / "pytorch_model.bin")
    for name, data in files.items():
        (path / name).write_bytes(data)
    return Folder(path, pickle=True)


@pytest.mark.parametrize("kind", SINGLE)
def test_sentencepiece(kind, tmp_path):
    name, marks, one, two, (last, number) = SINGLE[kind]
    folder = folder_of(tmp_path, {"model_type": kind}, **{name: message(marked(*marks) + plain())})
    (ours,) = tokenizers_of(folder, folder.config)
    assert ours.inner.encode("  a   bc ").ids == one
    assert ours.inner.encode("a", "c").ids == two
    assert ours.inner.token_to_id(last) == number
    if kind == "albert":
        assert ours.inner.encode("Á").ids == [2, 9, 3]


@pytest.mark.parametrize(("kind", "unigram"), [("llama", False), ("mbart", True)])
def test_sentencepiece_that_is_not_read(kind, unigram, tmp_path):
    data = message(marked("<unk>", "<s>", "</s>") + plain(), unigram)
    folder = folder_of(tmp_path, {"model_type": kind}, **{"tokenizer.model": data})
    with pytest.raises(UserError, match=r"tokenizer\.model is a SentencePiece model of .* save the tokenizer with"):
        tokenizers_of(folder, folder.config)


def test_marian(tmp_path):
    """Pieces of the other side are none of this one, a lone character of it excepted; a language stands in front."""
    source = {"▁": -3.0, "a": -3.0, "b": -3.0, "▁a": -2.0}
    target = {"▁": -3.0, "a": -3.0, "ab": -1.0, "ö": -2.0, "ü": -2.0, "aö": -1.0}
    names = ["</s>", "<unk>", *dict.fromkeys([*source, *target]), ">>fra<<", "<pad>"]
    marks = marked("<unk>", "<s>", "</s>")
    files = {"source.spm": message(marks + plain(source)), "target.spm": message(marks + plain(target)),
             "vocab.json": json.dumps({name: i for i, name in enumerate(names)}).encode()}  # fmt: skip
    folder = folder_of(tmp_path, {"model_type": "marian", "eos_token_id": 0, "pad_token_id": 11}, **files)
    one, other = tokenizers_of(folder, folder.config)

    def told(tokenizer, text):
        return [names[i] for i in tokenizer.encode([text])[0]]

    assert told(one, "ab") == ["▁a", "b"]
    assert told(other, "ab") == ["▁", "ab"]
    assert told(one, "aöb") == ["▁a", "ö", "b"]
    assert told(one, "aöüb") == ["▁a", "<unk>", "b"]
    assert told(one, ">>fra<< a b ") == [">>fra<<", "▁a", "▁", "b"]
    assert other.decode([names.index("▁a"), names.index("ö")]) == "aö"


def test_tokens_that_were_added_later(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    added = {"added_tokens_decoder": {"7": {"content": "[E2]", "special": True}}}
    files = {"vocab.txt": "\n".join(words).encode(), "added_tokens.json": b'{"[E1]": 6}',
             "tokenizer_config.json": json.dumps(added).encode()}  # fmt: skip
    folder = folder_of(tmp_path, {"model_type": "bert"}, **files)
    (ours,) = tokenizers_of(folder, folder.config)
    assert ours.encode(["a [E1] a"])[0] == [5, 6, 5]
    assert (ours.size, ours.inner.token_to_id("[E2]")) == (8, 7)
    (tmp_path / "added_tokens.json").write_text('{"[E1]": 9}')
    with pytest.raises(UserError, match=r"the added token \[E2\] should be number 7, and becomes 6"):
        tokenizers_of(folder, folder.config)


def test_several_marks_end_a_text(tmp_path):
    """As those of Llama 3 for conversations: whichever comes first."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(20))]
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    marks = {"bos_token_id": 1, "eos_token_id": 2}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(words), **sizes, **marks))
    randomise(theirs.eval(), 0.5)
    prompt = torch.tensor([[5, 9]])
    free = theirs.generate(prompt, do_sample=False, max_new_tokens=6)[0, 2:].tolist()
    theirs.generation_config.eos_token_id = [2, free[3]]
    theirs.save_pretrained(tmp_path / "theirs")
    inner.save(str(tmp_path / "theirs" / "tokenizer.json"))
    convert(tmp_path / "theirs", tmp_path / "run")
    want = theirs.generate(prompt, do_sample=False, max_new_tokens=6)[0, 2:-1].tolist()
    for beam in (1, 2):
        answer = regard.load(tmp_path / "run").predict(["w2 w6"], DecodeConfig(max_new_tokens=6, beam=beam))[0][0]
        assert answer.ended
        assert beam > 1 or [words.index(token) for token in answer.tokens] == want
    assert len(want) < 6
