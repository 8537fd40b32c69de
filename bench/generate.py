"""Speed of greedy generation: GPT-2 small compared with Hugging Face with the same weights.

    python bench/generate.py --write          ten minutes on two cores

Random weights cost what trained ones do. For one row, the time per token after the first is compared with the time of
reading all weights once on this machine. Contenders take turns.
Needs: pip install -c constraints.txt -e .[bench]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

import results
from race import Contender, race, ratios, speeds
from regard.convert import convert
from train import limits


def hugging(folder: Path) -> int:
    """Write GPT-2 small with random weights, and return the bytes that one token reads: all weights but the position
    table, with the tied embedding counted once."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    made = GPT2LMHeadModel(GPT2Config())
    made.save_pretrained(folder)
    return sum(p.nbytes for name, p in made.named_parameters() if "wpe" not in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    threads = given.threads or torch.get_num_threads()
    _, reading = limits(threads)
    table = []
    with tempfile.TemporaryDirectory() as folder:
        size = hugging(Path(folder) / "hf")
        convert(Path(folder) / "hf", Path(folder) / "run")
        for rows in map(int, given.rows.split(",")):
            shared = (str(rows), str(given.prompt), str(given.new), str(threads))
            made = [
                Contender("regard", "generate.py", "ours", f"{folder}/run", *shared, threads=threads),
                Contender("regard, int8", "generate.py", "ours", f"{folder}/run", *shared, "int8", threads=threads),
                Contender("Hugging Face", "generate.py", "hugging", f"{folder}/hf", *shared, threads=threads),
            ]
            race(made, given.rounds)
            reading = max(reading, limits(threads)[1])  # at the best: the machine is not always the same
            answers = [one.ask("answers")["answers"] for one in made]
            for one, said in zip(made, answers, strict=True):
                speed = statistics.median(speeds(one, "tokens"))
                later = [(told["tokens"] - rows) / (told["seconds"] - told["first"]) for told in one.rounds]
                after = statistics.median(later)  # the first token, which comes with the prompt
                same = float((torch.tensor(said) == torch.tensor(answers[-1])).float().mean())
                bound = f"{after * size / 1e9 / reading:.0%}" if rows == 1 and one.name != "regard, int8" else ""
                table.append([str(rows), one.name, f"{speed:,.1f}", ratios(made[0], one, "tokens"), f"{after:,.1f}",
                              f"{one.rounds[-1]['peak']:,.0f}", f"{same:.0%}", bound])  # fmt: skip
                one.end()
    head = [
        "rows",
        "",
        "tokens/s",
        "regard is faster by",
        "after the first",
        "peak MiB",
        "tokens as Hugging Face",
        "of what reading allows",
    ]
    lines = [
        f"- {results.conditions(threads)}",
        f"- GPT-2 small, random weights, prompts of {given.prompt}, {given.new} new tokens, {given.rounds} rounds in "
        f"turn; medians, and from the least to the most. This machine reads {reading:.1f} GB/s, the weights are "
        f"{size / 1e9:.2f} GB.",
        "",
        *results.table(head, table),
    ]
    if given.write:
        results.write("Speed of generation", lines)


if __name__ == "__main__":
    main()
