"""Pictures of attention patterns: which keys each query may attend to, as text for a terminal and as a PNG."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Pattern, UserError
from regard.pattern.analysis import pairs, slots

from . import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import, and needed for images alone

MAX_COLUMNS = 64  # characters of a text picture; a character stands for several positions of longer sequences
MAX_LENGTH = 4096
HALVES = "·▄▀█"  # two queries in one character: neither, lower, upper, both
SHADES = "·░▒▓█"  # share of allowed pairs: none, up to 1/3, up to 2/3, more, all
ASCII_SHADES = ".-+*#"


def text(pattern: Pattern | str, length: int = 32, ascii: bool = False) -> str:
    """Draw the first `length` positions: a line per query (two queries in half-blocks, unless `ascii`), a column per
    key, and one picture per head where heads differ."""
    pattern, mask = _mask(pattern, length)
    scale = -(-length // MAX_COLUMNS)
    lines = [str(pattern)]
    groups = _group_heads(mask)
    for heads, allowed in groups:
        if len(groups) > 1:
            lines.append(_head_label(heads, mask))
        lines += _text_rows(allowed, scale, ascii)
    return "\n".join([*lines, _legend(scale, ascii), _summary(pattern, length)])


def png(pattern: Pattern | str, length: int, path: str | Path) -> Path:
    """Write the picture as a PNG: queries are rows, keys are columns, dark where a query may attend."""
    path = picture.check_path(path)
    return picture.write(figure(pattern, length), path, 150)


def figure(pattern: Pattern | str, length: int) -> Figure:
    """Draw the picture, one square per group of equal heads."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pattern, mask = _mask(pattern, length)
    groups = _group_heads(mask)
    columns = min(len(groups), 4)
    rows = -(-len(groups) // columns)
    chart = Figure(figsize=(0.8 + 3.6 * columns, 1.4 + 3.6 * rows), layout="constrained")
    FigureCanvasAgg(chart)
    squares = chart.subplots(rows, columns, squeeze=False).flatten()
    for axes, (heads, allowed) in zip(squares, groups, strict=False):
        axes.imshow(allowed.numpy(), cmap="Blues", vmin=0, vmax=1.25, interpolation="nearest", aspect="equal")
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        if len(groups) > 1:
            axes.set_title(_head_label(heads, mask), fontsize=9)
        if length <= 64:  # a grid between the positions
            edges = [at - 0.5 for at in range(length + 1)]
            axes.set_xticks(edges, minor=True)
            axes.set_yticks(edges, minor=True)
            axes.grid(which="minor", color="0.85", linewidth=0.5)
            axes.tick_params(which="minor", length=0)
    for axes in squares[len(groups) :]:
        axes.set_axis_off()
    chart.suptitle(textwrap.fill(str(pattern), 46 * columns), fontsize=11)
    chart.supxlabel(textwrap.fill(_summary(pattern, length), 66 * columns), fontsize=8, color="0.35")
    return chart


def _mask(pattern: Pattern | str, length: int) -> tuple[Pattern, Tensor]:
    pattern = Pattern.parse(pattern) if isinstance(pattern, str) else pattern
    if not 1 <= length <= MAX_LENGTH:
        raise UserError(f"a picture shows from 1 to {MAX_LENGTH} positions, not {length}")
    return pattern, pattern.mask(length)  # (heads, length, length)


def _group_heads(mask: Tensor) -> list[tuple[list[int], Tensor]]:
    """Return the groups of heads with equal masks, and the mask of each."""
    groups: list[tuple[list[int], Tensor]] = []
    for head, allowed in enumerate(mask):
        for heads, other in groups:
            if torch.equal(other, allowed):
                heads.append(head)
                break
        else:
            groups.append(([head], allowed))
    return groups


def _head_label(heads: list[int], mask: Tensor) -> str:
    return f"head {', '.join(map(str, heads))} of every {len(mask)}"


def _text_rows(allowed: Tensor, scale: int, ascii: bool) -> list[str]:
    length = len(allowed)
    if scale > 1:
        share = _shares(allowed, scale)
        level = torch.where(share == 1, 4, (share * 3 - 1e-4).ceil().clamp(0, 3)).long()
        rows, at = [[(ASCII_SHADES if ascii else SHADES)[i] for i in row] for row in level.tolist()], 2 * scale
    elif ascii:
        rows, at = [[ASCII_SHADES[4 * seen] for seen in row] for row in allowed.tolist()], 1
    else:
        two = F.pad(allowed.long(), (0, 0, 0, length % 2)).unflatten(0, (-1, 2))
        rows, at = [[HALVES[i] for i in row] for row in (2 * two[:, 0] + two[:, 1]).tolist()], 2
    digits = len(str(length - 1))
    return [f"{index * at:>{digits}} {''.join(row)}" for index, row in enumerate(rows)]


def _shares(allowed: Tensor, scale: int) -> Tensor:
    """Return the share of allowed pairs in each rectangle of 2 `scale` queries by `scale` keys, since characters are
    tall."""
    return F.avg_pool2d(allowed[None].float(), (2 * scale, scale), ceil_mode=True)[0]


def _legend(scale: int, ascii: bool) -> str:
    if scale > 1:
        shades = ASCII_SHADES if ascii else SHADES
        signs = f"a character is {2 * scale} x {scale}: {shades[0]} none allowed, {shades[1:4]} some, {shades[4]} all"
    elif ascii:
        signs = f"{ASCII_SHADES[4]} allowed, {ASCII_SHADES[0]} masked"
    else:
        signs = f"two queries per line: {HALVES[3]} both allowed, {HALVES[2]} the upper, {HALVES[1]} the lower"
    return f"rows are queries, columns are keys; {signs}"


def _summary(pattern: Pattern, length: int) -> str:
    count = pairs(pattern, length) / length
    summary = f"{length} positions, a query attends to {count:.4g} keys on average"
    if not pattern.causal:
        return f"{summary}, not causal"
    return f"{summary}, causal, with a cache of {slots(pattern, length, 1).counts[length - 1]} keys"
