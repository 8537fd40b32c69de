"""Draw docs/architecture.svg: the folders of regard, and an arrow from each to those that it imports.

    python -m docs.draw_architecture

An arrow that others already imply is left out (the transitive reduction). A folder stands one row below the lowest of
those that import it. An arrow over several rows passes each of them through a free place of its own, as in Sugiyama et
al. 1981; the order within the rows is the one with the shortest arrows and the fewest crossings among many tries.
"""

import random
from collections.abc import Iterable
from itertools import combinations, pairwise
from pathlib import Path

from tests.test_imports import ROOT, graph

FILE = Path(__file__).parent / "architecture.svg"
SAYS = {
    "cli": "the commands",
    "look": "pictures, profiles",
    "verify": "laws, parity",
    "export": "for other programs",
    "train": "loop, optimizer",
    "tasks": "one user's job per file",
    "convert": "other people's weights",
    "passes": "LoRA, BitNet",
    "parts": "one paper's idea per file",
    "runs": "run folder, checkpoint",
    "decode": "one strategy per file",
    "bases": "what parts share",
    "data": "files to batches",
    "core": "contracts and model",
    "ops": "tensors in, tensors out",
    "pattern": "who may look at whom",
    "native": "C++ kernels",
    "files": "recipes, JSON, paths",
}
WIDE, HIGH, ACROSS, DOWN, EDGE = 158, 44, 182, 86, 16  # a box; from box to box; around all
NARROW = 34  # from one arrow to the next

Node = tuple[str, ...]  # a folder, or the place of an arrow in a row that it passes: from, to, row


def arrows(imports: dict[str, set[str]], folders: Iterable[str]) -> list[tuple[str, str]]:
    """Return from whom to whom in the transitive reduction among `folders`; imports by way of a module count."""
    below: dict[str, set[str]] = {}

    def reached(name: str) -> set[str]:
        if name not in below:
            below[name] = imports[name].union(*map(reached, imports[name]))
        return below[name]

    own = {name: reached(name) & set(folders) for name in folders}
    return sorted((a, b) for a in own for b in own[a] if not any(b in own[c] for c in own[a]))


def rows_of(folders: Iterable[str], links: list[tuple[str, str]]) -> dict[str, int]:
    """Return the row of each folder, counted from the top."""
    rows: dict[str, int] = {}

    def row(name: str) -> int:
        if name not in rows:
            rows[name] = max((row(a) + 1 for a, b in links if b == name), default=0)
        return rows[name]

    return {name: row(name) for name in folders}


def with_places(rows: dict[str, int], links: list[tuple[str, str]]) -> tuple[list[list[Node]], list[list[Node]]]:
    """Return what stands in each row, and each arrow as the nodes that it joins."""
    grid: list[list[Node]] = [[] for _ in range(max(rows.values()) + 1)]
    for name in sorted(rows):
        grid[rows[name]].append((name,))
    ways: list[list[Node]] = []
    for a, b in links:
        between: list[Node] = [(a, b, str(row)) for row in range(rows[a] + 1, rows[b])]
        ways.append([(a,), *between, (b,)])
        for row, node in enumerate(between, rows[a] + 1):
            grid[row].append(node)
    return grid, ways


def gap(a: Node, b: Node) -> int:
    """Return how far apart the middles of two neighbours in a row are at least."""
    return {2: ACROSS, 1: (ACROSS + NARROW) // 2, 0: NARROW}[(len(a) == 1) + (len(b) == 1)]


def spread(row: list[Node], wanted: dict[Node, float]) -> dict[Node, float]:
    """Return where the nodes of a row stand: as near to where they want to be as their order and width allow."""
    blocks: list[list] = []  # of nodes that touch: the sum of where each wants the block to begin, and their number
    offset, at = {}, 0
    for before, node in zip([None, *row], row, strict=False):
        at += gap(before, node) if before else 0
        offset[node] = at
        blocks.append([wanted[node] - at, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    begins = [total / count for total, count in blocks for _ in range(count)]
    return {node: begin + offset[node] for node, begin in zip(row, begins, strict=True)}


def placed(grid: list[list[Node]], ways: list[list[Node]], tries: int = 60) -> dict[Node, float]:
    """Return the middle of every node, from the left; the best of some tries."""
    near: dict[Node, list[Node]] = {node: [] for row in grid for node in row}
    steps = [step for way in ways for step in pairwise(way)]
    for a, b in steps:
        near[a].append(b)
        near[b].append(a)
    level = {node: index for index, row in enumerate(grid) for node in row}
    rng, best, least = random.Random(0), {}, float("inf")
    for _ in range(tries):
        x = {node: rng.uniform(0, 3 * ACROSS) for node in near}
        for sweep in range(40):
            for row in grid if sweep % 2 else reversed(grid):
                wanted = {node: sum(x[one] for one in near[node]) / max(len(near[node]), 1) for node in row}
                order = sorted(row, key=(wanted if sweep < 30 else x).__getitem__)
                x |= spread(order, wanted)
        crossings = sum(
            level[a] == level[c] and (x[a] - x[c]) * (x[b] - x[d]) < 0 for (a, b), (c, d) in combinations(steps, 2)
        )
        cost = 2 * ACROSS * crossings + sum(abs(x[a] - x[b]) for a, b in steps)
        if cost < least:
            best, least = x, cost
    left = min(x - (WIDE / 2 if len(node) == 1 else 0) for node, x in best.items())
    return {node: round(x - left + EDGE) for node, x in best.items()}


def drawn(imports: dict[str, set[str]]) -> str:
    """Return the picture as SVG. imports: for each folder and module, the others that it imports."""
    folders = sorted(name for name in imports if (ROOT / name).is_dir())
    links = arrows(imports, folders)
    grid, ways = with_places(rows_of(folders, links), links)
    x = placed(grid, ways)
    y = {node: EDGE + index * DOWN for index, row in enumerate(grid) for node in row}
    wide = max(x[node] + (WIDE // 2 if len(node) == 1 else 0) for node in x) + EDGE
    high = 2 * EDGE + (len(grid) - 1) * DOWN + HIGH
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        'font-family="Helvetica, Arial, sans-serif" text-anchor="middle">',
        f'<rect width="{wide}" height="{high}" fill="#ffffff"/>',
    ]
    for way in ways:
        points = [(x[way[0]], y[way[0]] + HIGH)]
        for node in way[1:-1]:
            points += [(x[node], y[node]), (x[node], y[node] + HIGH)]
        points.append((x[way[-1]], y[way[-1]] - 7))  # the tip of the arrow is drawn below
        line = f"M{points[0][0]} {points[0][1]}"
        for (a, b), (c, d) in pairwise(points):
            line += f" L{c} {d}" if a == c else f" C{a} {(b + d) // 2} {c} {(b + d) // 2} {c} {d}"
        out.append(f'<path id="{way[0][0]}-{way[-1][0]}" d="{line}" fill="none" stroke="#666666" stroke-width="1.3"/>')
        (c, d) = points[-1]
        out.append(f'<path d="M{c - 4} {d - 1} L{c + 4} {d - 1} L{c} {d + 7} Z" fill="#666666"/>')
    for name in folders:
        middle, top = x[(name,)], y[(name,)]
        fill = "#ffe9b8" if name in ("core", "parts") else "#eef2f7"
        out += [
            f'<rect x="{middle - WIDE // 2}" y="{top}" width="{WIDE}" height="{HIGH}" rx="5" fill="{fill}" '
            'stroke="#444444"/>',
            f'<text x="{middle}" y="{top + 18}" font-size="14" font-weight="bold">{name}</text>',
            f'<text x="{middle}" y="{top + 35}" font-size="11.5">{SAYS[name]}</text>',
        ]
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(drawn(graph()), encoding="utf-8")
