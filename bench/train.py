"""Speed of training: target tokens per second, compared with others on the same batches, model sizes and threads.

    python bench/train.py --write          three races, half an hour on two cores

pairs    4+4 layers, width 128, hidden 256, vocabulary 10,000, 4,096 target tokens a batch: Hugging Face's Marian,
         joeynmt by its own trainer, a loop around nn.Transformer
text     6 layers, width 384, context 256, vocabulary 10,000: Hugging Face's GPT-2, a loop as nanoGPT's, x-transformers
masked   an encoder of MiniLM's size (6 layers, width 384, hidden 1,536, 12 heads): Hugging Face's BERT

regard and Hugging Face begin with the same weights, and their first losses are compared before anything is timed.
Contenders take turns. Needs: pip install -c constraints.txt -e .[bench]; joeynmt and x-transformers get their own
environments.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import results
import runs
from race import Contender, environment, race, ratios, speeds
from regard import restore
from regard.convert import convert
from regard.data.batches import plan_batches

VOCAB = 10_000
BATCH = 4096


def sentences(part: str, side: str) -> list[list[str]]:
    """Return the sentences of Multi30k in BPE pieces."""
    return [line.split() for line in runs.lines_of(results.data(f"multi30k/bpe10k-en-de/{part}.{side}.gz"))]


def numbers() -> dict[str, int]:
    """Return the ids of the pieces, ordered by frequency."""
    often = Counter(piece for side in ("en", "de") for line in sentences("train", side) for piece in line)
    return {piece: i + 4 for i, piece in enumerate(sorted(often, key=lambda p: (-often[p], p))[: VOCAB - 4])}


def coded(lines: list[list[str]], number: dict[str, int]) -> list[list[int]]:
    return [[*(number.get(piece, 3) for piece in line), 2] for line in lines]


def pairs(batch: int = BATCH, most: int | None = 120) -> dict:
    """Return Multi30k in batches by length, as regard makes them."""
    number = numbers()
    sides = {name: coded(sentences("train", side), number) for name, side in (("source", "en"), ("target", "de"))}
    lengths = np.array([[len(line) for line in side] for side in sides.values()]).T
    order = plan_batches(lengths, batch, np.random.default_rng(1))[:most]
    batches = [{name: [side[n] for n in rows] for name, side in sides.items()} for rows in order]
    return {"batches": batches, "start": 1, "pad": 0}


def text(context: int, rows: int) -> dict:
    """Return batches of consecutive tokens of the same text."""
    made = pairs()
    stream = [token for batch in made["batches"] for line in batch["target"] for token in line]
    size = rows * (context + 1)
    batches = [np.array(stream[i : i + size]).reshape(rows, -1).tolist() for i in range(0, len(stream) - size, size)]
    return {"batches": [{"tokens": batch} for batch in batches], "start": 1, "pad": 0}


def masked(context: int, rows: int) -> dict:
    """Return the same with 15 % masked."""
    made = text(context - 1, rows)
    rng = np.random.default_rng(1)
    for batch in made["batches"]:
        tokens = np.array(batch["tokens"])
        hidden = rng.random(tokens.shape) < 0.15
        batch["targets"] = np.where(hidden, tokens, -100).tolist()
        batch["tokens"] = np.where(hidden, 3, tokens).tolist()
    return made


def hugging(kind: str, folder: Path, dropout: float = 0.1) -> None:
    """Write a Hugging Face model with random weights into a folder."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, MarianConfig, MarianMTModel

    torch.manual_seed(1)
    if kind == "pairs":
        side = {"layers": 4, "ffn_dim": 256, "attention_heads": 4}
        both = {f"{which}_{key}": value for which in ("encoder", "decoder") for key, value in side.items()}
        config = MarianConfig(
            vocab_size=VOCAB, d_model=128, max_position_embeddings=512, activation_function="relu", dropout=dropout,
            attention_dropout=0.0, activation_dropout=0.0, scale_embedding=True, pad_token_id=0, eos_token_id=2,
            bos_token_id=1, decoder_start_token_id=1, forced_eos_token_id=2, **both,
        )  # fmt: skip
        made = MarianMTModel(config)
    elif kind == "text":
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=384, n_layer=6, n_head=6, n_positions=256, resid_pdrop=0.1, embd_pdrop=0.1,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        made = GPT2LMHeadModel(config)
    else:
        config = BertConfig(
            vocab_size=VOCAB, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
            hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        made = BertForMaskedLM(config)
    made.save_pretrained(folder)


def joey(folder: Path) -> Path:
    """Write the same sentences, sizes and settings as files and a configuration of joeynmt."""
    (folder / "model").mkdir(parents=True)
    number = numbers()
    for part in ("train", "valid"):
        for side in ("en", "de"):
            lines = (" ".join(line) for line in sentences(part, side))
            (folder / f"{part}.{side}").write_text("\n".join(lines) + "\n")
    marks = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}
    words = folder / "words.txt"
    words.write_text("\n".join([*marks.values(), *sorted(number, key=number.__getitem__)]) + "\n")
    shared = {"level": "word", "max_length": 200, "voc_file": str(words), "lowercase": False}
    stack = {
        "type": "transformer", "num_layers": 4, "num_heads": 4, "hidden_size": 128, "ff_size": 256, "dropout": 0.1,
        "layer_norm": "post", "embeddings": {"embedding_dim": 128, "scale": True, "dropout": 0.1},
    }  # fmt: skip
    config = {
        "name": "multi30k", "joeynmt_version": "2.3.0", "model_dir": str(folder / "model"), "use_cuda": False,
        "fp16": False, "random_seed": 1,
        "data": {
            "train": str(folder / "train"), "dev": str(folder / "valid"), "dataset_type": "plain",
            "src": {"lang": "en", **shared}, "trg": {"lang": "de", **shared},
            "special_symbols": {f"{name}_token": mark for name, mark in marks.items()}
            | {f"{name}_id": i for i, name in enumerate(marks)},
        },
        "testing": {"beam_size": 1, "batch_size": 64, "batch_type": "sentence", "eval_metrics": ["bleu"]},
        "training": {
            "optimizer": "adam", "adam_betas": [0.9, 0.98], "learning_rate": 0.0001, "clip_grad_norm": 1.0,
            "batch_size": BATCH, "batch_type": "token", "batch_multiplier": 1, "normalization": "tokens",
            "loss": "crossentropy", "label_smoothing": 0.0, "epochs": 100, "shuffle": True,
            "early_stopping_metric": "loss", "scheduling": "warmupinversesquareroot", "learning_rate_warmup": 4000,
        },
        "model": {
            "tied_embeddings": True, "tied_softmax": True, "initializer": "xavier_uniform",
            "embed_initializer": "xavier_uniform", "bias_initializer": "zeros", "encoder": stack, "decoder": stack,
        },
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))  # which YAML contains
    return path


def limits(threads: int) -> tuple[float, float]:
    """Return this machine's limits: GFLOP/s of float32 products, GB/s of reading."""
    torch.set_num_threads(threads or torch.get_num_threads())
    one, two, long = torch.randn(2048, 2048), torch.randn(2048, 2048), torch.randn(64 << 20)
    products = min(_seconds(lambda: one @ two) for _ in range(5))
    reading = min(_seconds(lambda: long.sum()) for _ in range(5))
    return 2 * 2048**3 / products / 1e9, long.nbytes / reading / 1e9


def _seconds(run) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def work(kind: str, folder: Path) -> float:
    """Return the least matrix-product operations per target token: forward, and twice that backward. Only logits of
    target positions count, and no padding."""
    model, told = restore(folder / f"{kind}-run"), json.loads((folder / f"{kind}.json").read_text())
    words = 2 * model.width * VOCAB
    looking = [m for m in model.stack.modules() if getattr(m, "over", "") == "memory"]
    across = sum(2 * (m.k.weight.numel() + m.v.weight.numel()) for m in looking)  # type: ignore[operator, union-attr]
    total = tokens = 0
    for batch in told["batches"]:
        if kind == "pairs":
            lengths = Counter((len(one), len(two)) for one, two in zip(batch["source"], batch["target"], strict=True))
            for (source, target), many in lengths.items():
                total += many * (model.encoder.cost(source).flops + model.stack.cost(target).flops)
                total += many * (source * across + target * words)
                tokens += many * target
            continue
        rows, length = np.shape(batch["tokens"])
        asked = int((np.array(batch["targets"]) >= 0).sum()) if kind == "masked" else rows * (length - 1)
        length -= kind == "text"
        total += rows * model.stack.cost(length).flops + asked * words
        tokens += asked
    return 3 * total / tokens


def contenders(kind: str, folder: Path, threads: int, asked: list[str], many: int) -> list[Contender]:
    data = {"pairs": pairs, "text": lambda: text(256, 16), "masked": lambda: masked(128, 32)}[kind]()
    data["batches"] = data["batches"][:many]  # those that the race takes: the memory of others is nobody's
    batches = folder / f"{kind}.json"
    batches.write_text(json.dumps(data))
    hugging(kind, folder / f"{kind}-hf")
    convert(folder / f"{kind}-hf", folder / f"{kind}-run")
    made = [
        Contender("regard", "ours.py", str(folder / f"{kind}-run"), str(batches), kind, threads=threads),
        Contender("Hugging Face", "hugging.py", str(folder / f"{kind}-hf"), str(batches), kind, threads=threads),
    ]
    if kind == "pairs":
        sizes = ("128", "4", "4", "256", str(VOCAB), "0.1")
        made.append(Contender("nn.Transformer", "plain.py", "nn_transformer", str(batches), *sizes, threads=threads))
        if "joeynmt" in asked:
            python = environment("joeynmt", "torch==2.13.0", "joeynmt==2.3.0", "importlib-metadata")
            made.append(Contender("joeynmt", "joey.py", str(joey(folder / "joey")), python=python, threads=threads))
    if kind == "text":
        sizes = ("384", "6", "6", "1536", str(VOCAB), "0.1")
        made.append(Contender("nanoGPT-like", "plain.py", "gpt", str(batches), *sizes, threads=threads))
        if "x-transformers" in asked:
            python = environment("x-transformers", "torch==2.13.0", "x-transformers")
            given = ("plain.py", "x_transformers", str(batches), *sizes)
            made.append(Contender("x-transformers", *given, python=python, threads=threads))
    return made


def compare(
    kind: str, folder: Path, rounds: int, steps: int, threads: int, asked: list[str], products: float
) -> list[list[str]]:
    made = contenders(kind, folder, threads, asked, (rounds + 1) * steps)
    ours, peer = made[:2]
    losses = [one.ask("loss")["loss"] for one in (ours, peer)]
    if abs(losses[0] - losses[1]) > 1e-4:
        sys.exit(f"{kind}: the first losses differ, {losses[0]:.6f} and {losses[1]:.6f}: these are not the same models")
    race(made, rounds, str(steps))
    rows, least = [], work(kind, folder) / 1e9
    for one in made:
        speed = sorted(speeds(one, "tokens"))
        peak = one.rounds[-1]["peak"]
        middle = speed[len(speed) // 2]
        rows.append([kind, one.name, f"{middle:,.0f}", ratios(ours, one, "tokens"), f"{middle * least / products:.0%}",
                     f"{peak:,.0f}", f"{one.rounds[-1]['loss']:.3f}"])  # fmt: skip
        one.end()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", default="pairs,text,masked")
    parser.add_argument("--peers", default="joeynmt,x-transformers", help="with environments of their own, by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each contender in a round")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    products, reading = limits(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for kind in given.kinds.split(",")
            for row in compare(
                kind, Path(folder), given.rounds, given.steps, given.threads, given.peers.split(","), products
            )
        ]
    head = [
        "race", "", "target tokens/s", "regard is faster by", "of what products allow", "peak MiB", "last loss",
    ]  # fmt: skip
    lines = [
        f"- {results.conditions(given.threads)}",
        f"- This machine's own limits in this run: {products:.0f} GFLOP/s of products, {reading:.1f} GB/s of reading. "
        f"{given.rounds} rounds of {given.steps} steps, contenders in turn; medians, and from the least to the most. "
        "First losses of regard and Hugging Face are equal within 1e-4. What products allow: the speed if all "
        "necessary matrix products, without padding and without logits that are not targets, ran at that limit.",
        "",
        *results.table(head, rows),
    ]
    if given.write:
        results.write("Speed of training", lines)


if __name__ == "__main__":
    main()
