"""Every recipe trained for the same time on the data of its kind: causal ones on Shakespeare by characters, encoders on
sentiment of sentences, encoder-decoders on pronunciation.

    python bench/learn.py --minutes 3 --write        all of them, some hours; finished runs are not repeated
    python bench/learn.py --only retnet rwkv6

Data: ../shared/data/{tinyshakespeare,sst2,cmudict-g2p}. Sizes are `tiny` with four layers of width 128 where a recipe
allows it; everything else is as its recipe has it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import g2p
import results
import runs
import shakespeare
from regard.decode import DecodeConfig
from regard.files import recipe as recipes
from regard.machine import tune
from regard.tasks.load import load

TRAIN = {
    "train.optimizer": "adamw",
    "train.lr": 0.002,
    "train.warmup": 100,
    "train.schedule": "linear",
    "train.weight_decay": 0.01,
    "train.beta2": 0.99,
}
PLACES = {"sinusoidal": '"sinusoidal"', "learned": '{part = "learned", length = 1024}'}
CONTROLS = {  # how much is due to places that only the embedding tells
    f"transformer-decoder, {kind}": {"model.layer.0.mixer.position": "none", "model.embed.position": position}
    for kind, position in PLACES.items()
}
HEAD = ("recipe", "parameters", "epochs", "tokens/s", "dev loss", "", "decoded tokens/s", "state at 1024")
WORDS = ["transformer", "attention", "recurrence", "convolution", "memory", "cache", "beam", "gradient"] * 8
SLOW = (
    "- Where the embedding alone tells places (`mqa`, `linear-transformer`, `performer`, `gpt2`, `starcoder`), these "
    "few hundred steps go into finding the letter before: `transformer-decoder` with such places, two rows of its own, "
    "learns no faster. `floater` has to learn the flow of its places first."
)
LENGTH = 1024  # at which the state is told


class Kind(NamedTuple):
    """The data and settings for recipes of one kind."""

    title: str
    metric: str
    asked: tuple[str, ...]
    sets: dict[str, Any]


def kinds(folder: Path) -> dict[str, Kind]:
    train, dev = shakespeare.parts(folder / "shakespeare-data")
    return {
        "decoder": Kind(
            "Causal: characters of Shakespeare, context 256", "loss",
            ("--data", str(train), "--dev", str(dev), "--tokenizer", "characters"),
            {"train.batch_size": 8, "train.context_length": 256, "model.dropout": 0.0},
        ),
        "encoder": Kind(
            "Encoders: sentiment of sentences (SST-2, without phrases)", "accuracy",
            ("--data", str(results.data("sst2")), "--tokenizer", "words", "--vocab", "8000", "--metric", "accuracy"),
            {"train.batch_tokens": 2048, "model.dropout": 0.3, "train.lr": 0.001},
        ),
        "encoder-decoder": Kind(
            "Encoder-decoders: spelling to pronunciation (CMUdict), word error", "sequence_error",
            ("--data", str(g2p.tables(folder / "g2p-data")), "--tokenizer", "characters,pretokenised",
             "--any-reference", "--metric", "sequence_error"),
            {"train.batch_tokens": 1024, "model.dropout": 0.0, "model.tie": "target"},
        ),
    }  # fmt: skip


def kind_of(name: str) -> str | None:
    """Return the kind of a recipe; None where it needs other data: graphs, images."""
    recipe = recipes.load(name.partition(",")[0], "tiny")
    objective = recipe.get("objective", {}).get("part", "next_token")
    kind = recipe["model"]["kind"]
    embed = recipe["model"].get("embed", "tokens")
    embed = embed if isinstance(embed, str) else embed.get("part", "tokens")
    wanted = ("classify",) if kind == "encoder" else ("next_token", "segments")
    return kind if objective in wanted and embed == "tokens" else None


def decode_speed(run: Path, kind: str) -> float | None:
    """Return new tokens per second: of one prompt and 200 characters, or of some words in a batch."""
    loaded = load(run)
    if kind == "encoder" or not loaded.model.stack.streams:
        return None
    if kind == "decoder":
        texts, config = ["ROMEO:\n"], DecodeConfig(max_new_tokens=200, seed=1, temperature=1.0)
    else:
        texts, config = WORDS, DecodeConfig()
    loaded.predict(texts[:1], config)
    begun = time.perf_counter()
    found = loaded.predict(texts, config)
    return sum(len(best[0].tokens) for best in found) / (time.perf_counter() - begun)


def row(name: str, kind: str, how: Kind, run: Path) -> list[str]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = json.loads((run / "run.json").read_text())
    steps, evaluated = [line for line in lines if "lr" in line], [line for line in lines if "dev" in line]
    model = load(run).model
    speed = decode_speed(run, kind)
    state = model.cost(1, LENGTH - 1).state if speed else None
    return [
        f"`{name}`", f"{told['parameters'] / 1e6:.2f} M",
        f"{steps[-1]['epoch']:.2f}", f"{torch.tensor([s['tokens_per_second'] for s in steps]).median():,.0f}",
        f"{min(e['dev']['loss'] for e in evaluated):.3f}",
        f"{evaluated[-1]['dev'][how.metric]:.1f}",
        "" if speed is None else f"{speed:,.0f}", "" if state is None else f"{state / 1024:,.0f} KiB",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/learn"))
    parser.add_argument("--only", nargs="+", default=[*recipes.names(), *CONTROLS])
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the tables into bench/RESULTS.md")
    given = parser.parse_args()
    text = [f"- {results.conditions(given.threads)}", f"- {given.minutes:g} minutes each, seed 1.", SLOW]
    for kind, how in kinds(given.runs).items():
        rows = []
        for name in given.only:
            if kind_of(name) != kind:
                continue
            run = given.runs / name.replace(", ", "-")
            if not (run / "model.safetensors").exists():
                settings = TRAIN | how.sets | CONTROLS.get(name, {})
                sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
                runs.train(
                    run, name.partition(",")[0], "--size", "tiny", *how.asked, "--minutes", str(given.minutes),
                    "--seed", "1", *sets, "--threads", str(given.threads),
                )  # fmt: skip
            rows.append(row(name, kind, how, run))
        if rows:
            head = [name or how.metric for name in HEAD]
            rows.sort(key=lambda cells: float(cells[4]))
            if how.metric == "loss":
                head, *rows = [cells[:5] + cells[6:] for cells in (head, *rows)]
            text += ["", f"### {how.title}", "", *results.table(head, rows)]
    if given.write:
        results.write("They learn: every recipe for the same minutes", text)


if __name__ == "__main__":
    tune()
    main()
