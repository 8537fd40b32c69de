"""Start-up: how long the command line takes when nothing is computed, compared with `import torch` in the same rounds.

python bench/startup.py --write          half a minute
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import results

TITLE = "Start-up of the command line"
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "import regard": ["-c", "import regard"],
    "regard --help": ["-m", "regard", "--help"],
    "regard train --help": ["-m", "regard", "train", "--help"],
    "regard systems": ["-m", "regard", "systems"],
    "regard trian (a typo)": ["-m", "regard", "trian"],
    "regard show gtp2 (a typo)": ["-m", "regard", "show", "gtp2"],
}


def seconds(arguments: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    rounds = [{name: seconds(command) for name, command in COMMANDS.items()} for _ in range(given.rounds)]
    rows = []
    for name in COMMANDS:
        took = statistics.median(one[name] for one in rounds)
        share = statistics.median(one[name] / one["import torch"] for one in rounds)
        rows.append([f"`{name}`" if "(" not in name else name, f"{took:.2f} s", f"{share:.2f}"])
    lines = [f"- {results.conditions()} Medians of {given.rounds} rounds.", ""]
    lines += results.table(["", "time", "of `import torch`"], rows)
    if given.write:
        results.write(TITLE, lines)


if __name__ == "__main__":
    main()
