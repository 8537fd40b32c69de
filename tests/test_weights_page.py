"""docs/weights.md and the README's part on weights: their commands run, on small models made on the spot."""

import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import transformers

from regard.cli import main
from regard.convert import every_family
from regard.data.tokenizer import Tokenizer

from .convert.test_sentences import sentences

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "weights.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = ["paris is the capital of france .", "a good bad film", "once upon time"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(word for text in TEXT for word in text.split())]
ELSEWHERE = ("runs/vit", "runs/clip", "runs/whisper")  # tests/convert/test_images.py and tests/tasks/test_transcribe.py
BERT = {
    "vocab_size": len(WORDS), "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3,
    "intermediate_size": 40, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A home with models and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.manual_seed(0)
    texts = ["once upon a time", "paris is the capital of france"] * 9
    words = Tokenizer.train("bpe", texts, 300)
    gpt2 = transformers.GPT2Config(
        vocab_size=words.size, n_positions=64, n_embd=24, n_layer=2, n_head=3, bos_token_id=words.start,
        eos_token_id=words.end, pad_token_id=words.pad,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(gpt2).save_pretrained("models/gpt2")
    words.save("models/gpt2/tokenizer.json")
    config = transformers.BertConfig(**BERT)
    transformers.BertForMaskedLM(config).save_pretrained("models/bert")
    transformers.BertModel(config).save_pretrained("models/all-MiniLM-L6-v2")
    for name in ("bert", "all-MiniLM-L6-v2"):
        Path(f"models/{name}/vocab.txt").write_text("\n".join(WORDS))
    sentences(Path("models/all-MiniLM-L6-v2"))
    Path("sentences.txt").write_text("a good film\nonce upon a time\n")
    Path("pairs.tsv").write_text("a good film\ta bad film\nparis\tfrance\n")
    rows = [f"a {mood} film{' .' * n}\t{mood}" for mood in ("good", "bad") for n in range(12)]
    Path("reviews.tsv").write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    Path("mine.txt").write_text("\n".join(texts * 9))
    return tmp_path


def run(command: str, monkeypatch) -> None:
    said, bar, asked = command.partition(" | ") if command.startswith("echo") else ("", "", command)
    if bar:
        text = shlex.split(said)[1].encode() + b"\n"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    given = [str(Path(word).expanduser()) if word.startswith("~") else word for word in shlex.split(asked)[1:]]
    assert main(given) == 0, command


def test_the_page(place, monkeypatch, capsys):
    commands = re.findall(r"^\$ (.+)$", PAGE, re.M)
    assert len(commands) == 13
    assert main(["convert", "models/bert", "runs/bert"]) == 0
    for command in commands:
        if not any(run in command for run in ELSEWHERE):
            run(command, monkeypatch)
    assert (place / "models" / "gpt2-again" / "model.safetensors").read_bytes() == (
        place / "models" / "gpt2" / "model.safetensors"
    ).read_bytes()
    assert (place / "vectors.npy").is_file()
    assert transformers.GPT2LMHeadModel.from_pretrained("models/mine") is not None


def test_the_readme(place, monkeypatch, capsys):
    section = README[README.index("## Bring your weights") : README.index("## Systems")]
    commands = re.findall(r"^\.venv/bin/(regard .+)$", section, re.M)
    assert len(commands) == 4
    for command in commands:
        run(command, monkeypatch)
    assert (place / "models" / "mood" / "config.json").is_file()


def test_all_families_are_named():
    said = re.sub(r"[^a-z0-9]", "", PAGE.lower())
    for family in every_family().values():
        name = re.sub(r"[^a-z0-9]", "", family.model_type)
        assert {"transfoxl": "transformerxl", "gptbigcode": "gptbigcode", "qwen3": "qwen2and3"}.get(
            name, name
        ) in said, name
