"""How cost grows with the length: training and decoding of every decoder and encoder recipe that has a size `tiny`,
compared with full attention in one run, by time, peak memory and state. Recipes that contain full attention, or whose
attention is measured under another name, are left out unless they are asked for; so is graph attention, which needs a
graph.

    python bench/growth.py                              prints the tables
    python bench/growth.py --only local retnet          these, and full attention
    python bench/growth.py --write                      also into bench/RESULTS.md, and docs/growth.png
    python bench/growth.py --store growth.json          resumes a run with the same file

Each model is its size `tiny`, with one layer of each kind that its recipe has and no dropout; figures are per layer.
Each length is measured in a new process: memory is the peak of forward and backward together, beyond what the process
held before. Lengths that would take longer than --patience or more than --memory, by extrapolation, are left out.
Needs Linux.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import results
from patterns import Cell, growth, peak
from regard.core import Model, UserError, build, load, losses, state_bytes
from regard.files import recipe as recipes

ALIKE = (
    *("rotary", "xpos", "mqa", "gqa", "gpt2", "llama", "mistral", "qwen", "qwen3", "bloom", "mpt", "starcoder"),
    *("bert", "roberta", "albert", "distilbert", "minilm", "roformer", "xlnet", "vit", "gat", "gatv2"),
)
NOTES = (
    "Quadratic by design: ALiBi and BitNet change other things than which pairs are looked at, CRATE and GAU look at "
    "all, memory-compressed attention at a third, and YOCO's upper half at all that its lower half has made (it saves "
    "memory, and time before the first token). OpenAI's sparse patterns look at a few positions of every block, of "
    "which a longer sequence has more: by design n^1.5, of which a window hides a part (`sparse-fixed`, from 4k to "
    "16k: 64 to 160 keys for a query).",
    "Where theory pays little on a CPU: hashing (`reformer`, against `local`) and random blocks (`bigbird`, "
    "against `longformer`) take longer than a plain window, and `rmt` reads its memory anew in every segment.",
)
FULL = {"decoder": "transformer-decoder", "encoder": "transformer-encoder"}
PICTURE = Path(__file__).parents[1] / "docs" / "growth.png"
PLACES = (100, 1000, 16000)  # tokens before the one that is decoded
FILL = 512  # positions of a step that fills the state
TOKENS = 16  # decoded one by one at each place
VOCAB = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="recipes; full attention is always there")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that one forward and backward may take")
    parser.add_argument("--memory", type=float, default=8.0, help="gigabytes that one forward and backward may hold")
    parser.add_argument("--write", action="store_true", help="into bench/RESULTS.md and docs/growth.png")
    parser.add_argument("--store", type=Path, help="a file of what is measured so far, read first and kept up to date")
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)  # a recipe, and a length or "decode"
    return parser.parse_args()


def contenders(only: list[str] | None) -> dict[str, str]:
    """Return recipes and their kinds, full attention first."""
    kinds = {}
    for name in recipes.names():
        if "tiny" in recipes.sizes(name):
            kinds[name] = load(name, "tiny")["model"]["kind"]
    for name in only or ():
        if name not in kinds:
            sys.exit(f"no recipe '{name}' with a size tiny")
    first = list(FULL.values())
    asked = [name for name in kinds if name not in ALIKE] if only is None else only
    chosen = first + [name for name in kinds if name not in first and name in asked]
    return {name: kinds[name] for name in chosen if kinds[name] in FULL}


def prepare(name: str, length: int) -> tuple[Model, int]:
    """Return the model for sequences up to `length`, and its number of layers: one of each kind."""
    recipe = load(name, "tiny")
    model = recipe["model"]
    layers = model["layer"] if isinstance(model["layer"], list) else [model["layer"]]
    model["depth"] = len(layers)
    model["dropout"] = 0.0
    recipe["vocab"] = VOCAB
    lengthen(model, length)
    torch.manual_seed(0)
    return build(recipe), len(layers)


def lengthen(table: Any, length: int) -> None:
    """Set the arguments that depend on the length: learned positions, Linformer's projections."""
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        if key == "length" and isinstance(value, int):
            table[key] = max(value, length)
        elif isinstance(value, dict | list):
            lengthen(value, length)


def learn(model: Model, length: int) -> None:
    """Run forward and backward on one sequence."""
    with losses(model) as more:
        scores = model(model.embed.random_input(1, length))
        (scores.float().square().mean() + more()).backward()
    model.zero_grad()


def probe_training(name: str, length: int, rounds: int) -> dict[str, Any]:
    model, layers = prepare(name, length)
    learn(model, 256)  # what is loaded once
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
    before = peak()
    learn(model, length)
    held, seconds = peak() - before, []
    for _ in range(rounds):
        begin = time.perf_counter()
        learn(model, length)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(seconds) / layers, "memory": held / layers}


def probe_decoding(name: str) -> dict[str, Any]:
    """Return seconds per token and bytes of state, after so many tokens."""
    found: dict[str, Any] = {"seconds": {}, "state": {}}
    model, layers = prepare(name, max(PLACES) + 2 * TOKENS)
    model.eval()
    for place in PLACES:
        with torch.inference_mode():
            tokens = model.embed.random_input(1, place + 2 * TOKENS)
            state = model.start(1, place + 2 * TOKENS)
            for begin in range(0, place, FILL):
                state = model.step(tokens[:, begin : min(begin + FILL, place)], state)[1]
            seconds = []
            for at in range(place, place + 2 * TOKENS):  # the first half warms up
                begin = time.perf_counter()
                state = model.step(tokens[:, at : at + 1], state)[1]
                seconds.append(time.perf_counter() - begin)
        found["seconds"][place] = statistics.median(seconds[TOKENS:]) / layers
        found["state"][place] = state_bytes(state.layers) / layers
    return found


class Store:
    """The measurements so far, by recipe and length or "decode", in a file where one is named."""

    def __init__(self, path: Path | None):
        self.path = path
        self.known: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def measure(self, name: str, what: str, given: argparse.Namespace) -> dict[str, Any]:
        """Return what a new process measures, or {"failed": why}."""
        key = f"{name} {what}"
        if key not in self.known:
            same = [f"--{option}={getattr(given, option)}" for option in ("rounds", "threads")]
            command = [sys.executable, __file__, "--probe", name, what, *same]
            most = given.patience * (given.rounds + 3) + 60
            with results.console.status(key):
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=most)
                    failed = done.stderr.strip().splitlines()[-1:] or ["ended without a word"]
                    self.known[key] = {"failed": failed[0]} if done.returncode else json.loads(done.stdout)
                except subprocess.TimeoutExpired:
                    self.known[key] = {"failed": f"took more than {most:.0f} s"}
            if self.path:
                self.path.write_text(json.dumps(self.known, indent=1))
        return self.known[key]


class Measured:
    """All figures of a run."""

    def __init__(self) -> None:
        self.times: Cell = {}
        self.peaks: Cell = {}
        self.token_times: Cell = {}
        self.states: Cell = {}
        self.notes: list[str] = []

    def train(self, name: str, given: argparse.Namespace, store: Store) -> None:
        for length in sorted(given.lengths):
            seconds, memory = (foresee(cells, name, length) for cells in (self.times, self.peaks))
            if seconds > given.patience or memory > given.memory * 1024:
                self.notes.append(
                    f"{name} at {length} is left out: it would take about {seconds:,.0f} s and {memory:,.0f} MB."
                )
                return
            found = store.measure(name, str(length), given)
            if "failed" in found:
                self.notes.append(f"{name} at {length}: {found['failed']}.")
                return
            self.times[name, length], self.peaks[name, length] = found["seconds"], max(found["memory"], 0.1)

    def decode(self, name: str, given: argparse.Namespace, store: Store) -> None:
        found = store.measure(name, "decode", given)
        if "failed" in found:
            self.notes.append(f"{name}, decoding: {found['failed']}.")
            return
        for place in PLACES:
            self.token_times[name, place] = found["seconds"][str(place)]
            self.states[name, place] = found["state"][str(place)]


def foresee(cells: Cell, name: str, length: int) -> float:
    """Extrapolate from the last two lengths; 0 where there is none."""
    known = sorted((at, value) for (who, at), value in cells.items() if who == name)[-2:]
    if not known:
        return 0.0
    power = 2.0
    if len(known) == 2:
        (one, before), (two, after) = known
        power = max(math.log(after / before) / math.log(two / one), 1.0)
    return known[-1][1] * (length / known[-1][0]) ** power


def exponent(cells: Cell, name: str) -> str:
    """Return the exponent of the growth from 4k on."""
    power = growth({(who, at): value for (who, at), value in cells.items() if at >= 4096}, name)
    return "" if math.isnan(power) else f"n^{power:.2f}"


def pays(name: str, kind: str, times: Cell) -> str:
    """Return the length from which on it is faster than full attention."""
    lengths = sorted(length for who, length in times if who == name)
    slower = [length for length in lengths if times[name, length] >= times.get((FULL[kind], length), math.inf)]
    faster = [length for length in lengths if length > max(slower, default=0)]
    return "" if name in FULL.values() else str(faster[0]) if faster else "never"


def training_rows(kinds: dict[str, str], given: argparse.Namespace, found: Measured) -> list[list[str]]:
    longest, rows = max(given.lengths), []
    for name, kind in kinds.items():
        row = [name, kind]
        for length in sorted(given.lengths):
            row.append(f"{1000 * found.times[name, length]:,.0f}" if (name, length) in found.times else "")
        full = found.times.get((FULL[kind], longest))
        own = found.times.get((name, longest))
        row += [exponent(found.times, name), f"{full / own:.1f}" if full and own else "", pays(name, kind, found.times)]
        row += [f"{found.peaks[name, longest]:,.0f}" if (name, longest) in found.peaks else ""]
        rows.append([*row, exponent(found.peaks, name)])
    return rows


def decoding_rows(kinds: dict[str, str], found: Measured) -> list[list[str]]:
    rows = []
    for name in kinds:
        if (name, PLACES[0]) in found.token_times:
            times = [f"{1000 * found.token_times[name, place]:.2f}" for place in PLACES]
            slower = found.token_times[name, PLACES[-1]] / found.token_times[name, PLACES[0]]
            rows.append([name, *times, f"{slower:.1f}", *(f"{found.states[name, place]:,.0f}" for place in PLACES)])
    return rows


def draw(kinds: dict[str, str], found: Measured) -> None:
    """Draw docs/growth.png: time per token of training by length, and of decoding by position, both in log scales."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(13, 8.5), layout="constrained")
    FigureCanvasAgg(drawn)
    per_token = {(name, at): 1e6 * seconds / at for (name, at), seconds in found.times.items()}
    decoded = {key: 1e6 * seconds for key, seconds in found.token_times.items()}
    panels = (
        (per_token, "training: forward and backward", "length of the sequence"),
        (decoded, "decoding", "tokens before"),
    )
    colours = colormaps["turbo"]
    for axes, (cells, title, across) in zip(drawn.subplots(1, 2), panels, strict=True):
        for number, name in enumerate(kinds):
            points = sorted((at, value) for (who, at), value in cells.items() if who == name)
            if points:
                full = name in FULL.values()
                colour = "black" if full else colours((number + 0.5) / len(kinds))
                style = {"linewidth": 3 if full else 1.3, "linestyle": "-" if kinds[name] == "decoder" else "--"}
                axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=".", **style)
        axes.set_xscale("log", base=2 if cells is per_token else 10)
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel(across)
        axes.set_ylabel("microseconds per token and layer")
        axes.grid(alpha=0.3, which="both")
    handles, labels = drawn.axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    PICTURE.parent.mkdir(exist_ok=True)
    drawn.savefig(PICTURE, dpi=110)
    results.console.print(f"drawn to {PICTURE}")


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    if given.probe:
        name, what = given.probe
        try:
            found = probe_decoding(name) if what == "decode" else probe_training(name, int(what), given.rounds)
        except UserError as error:
            sys.exit(str(error))
        print(json.dumps(found))
        return
    kinds, found, store = contenders(given.only), Measured(), Store(given.store)
    for name, kind in kinds.items():
        found.train(name, given, store)
        if kind == "decoder":
            found.decode(name, given, store)
    told = "one layer of each kind as in size tiny (width 128, 4 heads), one sequence, float32; per layer"
    notes = [results.conditions(given.threads), f"{told}; median of {given.rounds} rounds.", *NOTES, *found.notes]
    lengths = [f"{length} (ms)" for length in sorted(given.lengths)]
    head = [
        "recipe",
        "kind",
        *lengths,
        "time grows as",
        "times as fast as full",
        "faster from",
        "peak (MB)",
        "memory grows as",
    ]
    text = [f"- {note}" for note in notes] + ["", *results.table(head, training_rows(kinds, given, found)), ""]
    head = ["recipe", *(f"token {place} (ms)" for place in PLACES), "times as slow at the last"]
    head += [f"state at {place} (bytes)" for place in PLACES]
    text += results.table(head, decoding_rows(kinds, found))
    for note in found.notes:
        results.console.print(f"- {note}")
    if given.write:
        results.write("Growth: what a longer sequence costs", [*text, "", "![growth](../docs/growth.png)"])
        draw(kinds, found)


if __name__ == "__main__":
    main()
