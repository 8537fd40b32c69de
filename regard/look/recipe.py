"""Pictures of a model summary: as text for a terminal, and as a PNG."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from . import pattern as pattern_picture
from .amount import format_count
from .anatomy import Box, CostAtLength, ModelSummary, Tower
from .picture import write

INK, GRAY = "#222222", "#777777"
COLORS = {"embed": "#e8dff5", "feedforward": "#fde8cf", "cross": "#d9efdc", "wiring": "#eeeeee", "norm": "#eeeeee"}
COLORS |= {"position": "#e8dff5", "head": "#f8d9dc"}
MIXER_COLOR = "#d6e6f7"
COLUMN, ROW, GAP = 4.6, 0.46, 0.34  # inches


def heading(picture: ModelSummary) -> str:
    """Return a one-line description: kind, size, width, vocabulary and passes."""
    vocab = " and ".join(f"{size:,}" for size in dict.fromkeys(picture.vocab))
    size = f"{format_count(picture.parameters)} parameters · width {picture.width:,}"
    words = [f"vocabulary {vocab}"] if vocab else []
    return " · ".join([picture.kind, size, *words, *(f"pass {name}" for name in picture.passes)])


def text(picture: ModelSummary, width: int = 100) -> str:
    """Return the model from input to output, its costs and its patterns, for a terminal of `width` columns, at least
    80."""
    width = max(width, 80)
    lines = [f"{picture.title}, {picture.year}" if picture.year else picture.title]
    lines += [*textwrap.wrap(picture.paper, width), *textwrap.wrap(picture.idea, width), ""]
    lines += textwrap.wrap(heading(picture), width)
    for tower in picture.towers:
        lines += _tower(tower, picture, width)
    lines += [*_frame([_row(picture.head, picture, width)], width), f"    ↓ scores {picture.scores}", ""]
    lines += [*cost_lines(picture), "", *_growth_lines(picture, width)]
    return "\n".join(line.rstrip() for line in lines + _patterns(picture, width))


def _tower(tower: Tower, picture: ModelSummary, width: int) -> list[str]:
    time = "source" if tower.side == "encoder" and len(picture.towers) > 1 else "time"
    lines = ["", f"{tower.side}, {tower.depth} layer{'s' * (tower.depth > 1)}", f"    ↓ (batch, {time})"]
    lines += _frame([_row(box, picture, width) for box in tower.before], width)
    lines.append(f"    ↓ (batch, {time}, {tower.before[0].width[1]:,})")
    for group in tower.groups:
        rows: list[list[str]] = []
        for index, layer in enumerate(group.layers):
            rows += [["─" * (width - 4)]] if index else []
            rows += [_row(box, picture, width) for box in layer]
        times = f" × {group.times}" if group.times > 1 else ""
        same = ", one set of weights" if tower.shared and group.times > 1 else ""
        lines += _frame(rows, width, f"layer{times}{same}", format_count(group.parameters))
        lines.append(f"    ↓ (batch, {time}, {group.layers[-1][-1].width[1]:,})")
    if tower.after:
        lines += _frame([_row(box, picture, width) for box in tower.after], width)
        lines.append(f"    ↓ (batch, {'' if tower.pools else f'{time}, '}{tower.width:,})")
    if time == "source":
        lines[-1] += "  the memory, to which the decoder attends"
    return lines


def _row(box: Box, picture: ModelSummary, width: int) -> list[str]:
    """Return "name  part  arguments  in → out  parameters"; long arguments continue on the next lines."""
    boxes = [box for tower in picture.towers for box in tower.boxes]
    names, parts = (min(16, max(len(getattr(box, key)) for box in [*boxes, picture.head])) for key in ("name", "part"))
    left = f"{box.name[:names]:<{names}}  {box.part[:parts]:<{parts}}  "
    change = f"{box.width[0]:,} → {box.width[1]:,}" if box.name != "wiring" else ""
    right = f"  {change:>12}{'tied' if box.tied else format_count(box.parameters):>8}"
    space = width - 4 - len(left) - len(right)
    wrapped = _wrap_arguments(box.given, space)
    return [f"{left}{wrapped[0]:<{space}}{right}", *(" " * len(left) + more for more in wrapped[1:])]


def _wrap_arguments(given: str, width: int) -> list[str]:
    """Wrap arguments over lines, breaking inside an argument only if it is longer than a line."""
    lines = [""]
    for piece in given.split("  "):
        for bit in textwrap.wrap(piece, width) or [""]:
            joined = f"{lines[-1]}  {bit}" if lines[-1] else bit
            lines = [*lines[:-1], joined] if len(joined) <= width else [*lines, bit]
    return lines


def _frame(rows: list[list[str]], width: int, title: str = "", foot: str = "") -> list[str]:
    top = f"╭─ {title} " if title else "╭"
    end = f" {foot} ─╯" if foot else "╯"
    body = [f"│ {line:<{width - 4}} │" for row in rows for line in row]
    return [top + "─" * (width - len(top) - 1) + "╮", *body, "╰" + "─" * (width - len(end) - 1) + end]


def _at(spent: CostAtLength) -> str:
    return f"{f'{spent.side}:' if spent.side else 'at'} {spent.length:,} positions"


def cost_lines(picture: ModelSummary) -> list[str]:
    """Return the table of costs as lines."""
    lines = [f"{'cost of one sequence':<40}" + "".join(f"{_at(s):>20}" for s in picture.spent)]
    which = "the decoder's" if any(s.encoder for s in picture.spent) else "a"
    rows = [
        ("flops of one more token", "token", ""),
        (f"flops of {which} pass, per token", "whole", ""),
        ("flops of the encoder's pass, per token", "encoder", ""),
        ("state, float32", "state", "B"),
    ]
    for name, key, unit in rows:
        values = [getattr(s, key) for s in picture.spent]
        if any(value is not None for value in values):
            cells = [format_count(value) + unit * (value is not None and value >= 1000) for value in values]
            lines.append(f"  {name:<38}" + "".join(f"{cell:>20}" for cell in cells))
    lines += [f"  at {s.length:,}: {s.note}" for s in picture.spent if s.note]
    if not any(s.token for s in picture.spent):
        lines.append(
            "  it writes all tokens of an answer at once, in one pass or a few"
            if picture.is_parallel
            else "  it needs whole sequences, so there is no decoding and no state"
        )
    return lines


def _growth_lines(picture: ModelSummary, width: int) -> list[str]:
    rows = [("", "per layer", "sequential", "longest path")]
    rows += [
        (f"{g.where}: {g.part}", f"O({g.complexity})", f"O({g.sequential})", f"O({g.path})") for g in picture.grows
    ]
    sizes = [max(len(row[column]) for row in rows) for column in range(1, 4)]
    first = max(20, min(width - sum(sizes) - 8, max(len(row[0]) for row in rows)))
    lines = ["growth with n positions of width d, as in Table 1 of Vaswani et al. 2017"]
    for row in rows:
        wrapped = textwrap.wrap(row[0], first) or [""]
        right = "".join(f"  {cell:>{size}}" for cell, size in zip(row[1:], sizes, strict=True))
        lines += [f"  {wrapped[0]:<{first}}{right}", *("  " + more for more in wrapped[1:])]
    return lines


def _patterns(picture: ModelSummary, width: int) -> list[str]:
    lines: list[str] = []
    for pattern, places in picture.patterns.items():
        sizes = [int(number) for number in re.findall(r"\d+", pattern)]
        length = min(1024, max(32, 3 * max(sizes, default=0)))  # long enough to show its sizes
        drawn = pattern_picture.text(pattern, length).splitlines()
        lines += ["", *textwrap.wrap(f"{', '.join(places)}: allowed pairs", width)]
        lines += [f"  {piece}" for line in drawn for piece in textwrap.wrap(line, width - 2)]
    return lines


def png(picture: ModelSummary, path: str | Path) -> None:
    """Write the picture as PNG: data flows upwards, and the encoder is left of its decoder."""
    from matplotlib.figure import Figure

    costs = cost_lines(picture)
    height = max(_height(tower) for tower in picture.towers) + ROW + 2 * GAP  # the head, and space below
    foot = 0.25 + 0.2 * len(costs)
    width, top = max(COLUMN * len(picture.towers) + 0.6, 6.4), foot + height + 1.2
    figure = Figure(figsize=(width, top), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, top))
    axes.axis("off")
    title = f"{picture.title}, {picture.year}" if picture.year else picture.title
    axes.text(0.3, top - 0.4, title, size=15, weight="bold", color=INK)
    columns = int(width * 13)
    description = [*textwrap.wrap(picture.idea, columns)[:2], heading(picture)]
    axes.text(0.3, top - 0.55, "\n".join(description), size=9, va="top", color=GRAY)
    tops = []
    for index, tower in enumerate(picture.towers):
        last = index == len(picture.towers) - 1
        label = tower.side if picture.kind == "towers" else "tokens" if last else "source"
        tops.append(_column(axes, tower, 0.3 + COLUMN * index, foot + GAP, label, picture.head if last else None))
    if picture.kind == "encoder-decoder":
        (_, _, out), (into, middle, _) = tops
        aside = into - 0.2
        axes.plot([into - 0.58 - (COLUMN - 0.7) / 2, aside, aside], [out, out, middle], color=INK, linewidth=1)
        axes.annotate("", (into, middle), (aside, middle), arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkA": 0})
    axes.text(0.3, foot - 0.1, "\n".join(costs), size=7.5, family="monospace", va="top", color=INK)
    write(figure, path)


def _height(tower: Tower) -> float:
    boxes = ROW * (len(tower.before) + len(tower.after)) + GAP * (1 + len(tower.after))
    return boxes + sum(GAP * 1.7 + ROW * sum(len(layer) for layer in group.layers) for group in tower.groups)


def _column(axes: Any, tower: Tower, x: float, y: float, label: str, head: Box | None) -> tuple[float, float, float]:
    """Draw a tower upwards from y over the `label` of its input. Return its left edge, the middle of its layers, its
    top."""
    inner = COLUMN - 0.7
    axes.text(x + inner / 2, y - 0.05, label, size=8, ha="center", va="top", color=GRAY)

    def arrow(y: float, label: str = "") -> float:
        axes.annotate("", (x + inner / 2, y + GAP), (x + inner / 2, y), arrowprops={"arrowstyle": "-|>", "color": INK})
        axes.text(x + inner / 2 + 0.1, y + GAP / 2, label, size=7, va="center", color=GRAY)
        return y + GAP

    for box in tower.before:
        y = _draw(axes, box, x, y, inner)
    y = arrow(y, f"{tower.before[0].width[1]:,}")
    begin = y
    for group in tower.groups:
        size = ROW * sum(len(layer) for layer in group.layers) + GAP * 0.7
        _round(axes, x - 0.12, y, inner + 0.24, size, "#fbfbfb", GRAY)
        times = f"× {group.times}" if group.times > 1 else ""
        axes.text(x + inner + 0.1, y + size + 0.05, times, size=11, ha="right", color=INK)
        inside = y + GAP * 0.35
        for box in (box for layer in group.layers for box in layer):
            inside = _draw(axes, box, x, inside, inner)
        y = arrow(y + size, f"{group.layers[-1][-1].width[1]:,}")
    middle = (begin + y - GAP) / 2
    for box in tower.after:
        y = arrow(_draw(axes, box, x, y, inner), f"{tower.width:,}")
    if head is not None:
        y = arrow(_draw(axes, head, x, y, inner), f"scores, {head.width[1]:,}")
    return x - 0.12, middle, y


def _draw(axes: Any, box: Box, x: float, y: float, width: float) -> float:
    _round(axes, x, y + 0.03, width, ROW - 0.06, COLORS.get(box.name, MIXER_COLOR), GRAY)
    size = "tied" if box.tied else format_count(box.parameters)
    given = box.given if len(box.given) <= 52 else box.given[:51] + "…"
    axes.text(x + 0.1, y + 0.28, f"{box.name}: {box.part}", size=8, va="center", weight="bold", color=INK)
    axes.text(x + 0.1, y + 0.13, given, size=6.5, va="center", color=INK)
    axes.text(x + width - 0.1, y + 0.28, size, size=7, ha="right", va="center", color=GRAY)
    return y + ROW


def _round(axes: Any, x: float, y: float, width: float, height: float, fill: str, edge: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.07"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=0.8))
