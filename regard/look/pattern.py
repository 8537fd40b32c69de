"""Pictures of a pattern: who may look at whom, as text for a terminal and as a PNG."""

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

WIDEST = 64  # characters of a text picture; longer sequences are shown in rectangles of several positions
LONGEST = 4096
HALVES = "·▄▀█"  # two queries in one character: neither, the lower, the upper, both
SHADES = "·░▒▓█"  # a rectangle of pairs: none, up to a third, up to two thirds, more, all
PLAIN = ".-+*#"


def text(pattern: Pattern | str, length: int = 32, ascii: bool = False) -> str:
    """The first `length` positions, a line for each query (two of them in half-blocks, unless `ascii`), a column for
    each key; one picture per head where heads differ."""
    pattern, mask = _mask(pattern, length)
    scale = -(-length // WIDEST)
    lines = [str(pattern)]
    different = _different(mask)
    for heads, allowed in different:
        if len(different) > 1:
            lines.append(_which(heads, mask))
        lines += _rows(allowed, scale, ascii)
    return "\n".join([*lines, _legend(scale, ascii), _facts(pattern, length)])


def png(pattern: Pattern | str, length: int, path: str | Path) -> Path:
    """The same as an image: queries are rows, keys are columns, dark where a query may look."""
    path = picture.place(path)
    return picture.write(figure(pattern, length), path, 150)


def figure(pattern: Pattern | str, length: int) -> Figure:
    """The image before it is written, one square for each head that differs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pattern, mask = _mask(pattern, length)
    different = _different(mask)
    columns = min(len(different), 4)
    rows = -(-len(different) // columns)
    drawn = Figure(figsize=(0.8 + 3.6 * columns, 1.4 + 3.6 * rows), layout="constrained")
    FigureCanvasAgg(drawn)
    squares = drawn.subplots(rows, columns, squeeze=False).flatten()
    for axes, (heads, allowed) in zip(squares, different, strict=False):
        axes.imshow(allowed.numpy(), cmap="Blues", vmin=0, vmax=1.25, interpolation="nearest", aspect="equal")
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        if len(different) > 1:
            axes.set_title(_which(heads, mask), fontsize=9)
        if length <= 64:  # a grid between the positions
            edges = [at - 0.5 for at in range(length + 1)]
            axes.set_xticks(edges, minor=True)
            axes.set_yticks(edges, minor=True)
            axes.grid(which="minor", color="0.85", linewidth=0.5)
            axes.tick_params(which="minor", length=0)
    for axes in squares[len(different) :]:
        axes.set_axis_off()
    drawn.suptitle(textwrap.fill(str(pattern), 46 * columns), fontsize=11)
    drawn.supxlabel(textwrap.fill(_facts(pattern, length), 66 * columns), fontsize=8, color="0.35")
    return drawn


def _mask(pattern: Pattern | str, length: int) -> tuple[Pattern, Tensor]:
    pattern = Pattern.parse(pattern) if isinstance(pattern, str) else pattern
    if not 1 <= length <= LONGEST:
        raise UserError(f"a picture shows from 1 to {LONGEST} positions, not {length}")
    return pattern, pattern.mask(length)  # (heads, length, length)


def _different(mask: Tensor) -> list[tuple[list[int], Tensor]]:
    """The heads that look alike, and how."""
    groups: list[tuple[list[int], Tensor]] = []
    for head, allowed in enumerate(mask):
        for heads, other in groups:
            if torch.equal(other, allowed):
                heads.append(head)
                break
        else:
            groups.append(([head], allowed))
    return groups


def _which(heads: list[int], mask: Tensor) -> str:
    return f"head {', '.join(map(str, heads))} of every {len(mask)}"


def _rows(allowed: Tensor, scale: int, ascii: bool) -> list[str]:
    length = len(allowed)
    if scale > 1:
        share = _shares(allowed, scale)
        level = torch.where(share == 1, 4, (share * 3 - 1e-4).ceil().clamp(0, 3)).long()
        rows, at = [[(PLAIN if ascii else SHADES)[i] for i in row] for row in level.tolist()], 2 * scale
    elif ascii:
        rows, at = [[PLAIN[4 * seen] for seen in row] for row in allowed.tolist()], 1
    else:
        two = F.pad(allowed.long(), (0, 0, 0, length % 2)).unflatten(0, (-1, 2))
        rows, at = [[HALVES[i] for i in row] for row in (2 * two[:, 0] + two[:, 1]).tolist()], 2
    wide = len(str(length - 1))
    return [f"{index * at:>{wide}} {''.join(row)}" for index, row in enumerate(rows)]


def _shares(allowed: Tensor, scale: int) -> Tensor:
    """How much of each rectangle, twice as many queries as keys since signs are tall, is seen. At the edges only what
    is there counts."""
    return F.avg_pool2d(allowed[None].float(), (2 * scale, scale), ceil_mode=True)[0]


def _legend(scale: int, ascii: bool) -> str:
    if scale > 1:
        shades = PLAIN if ascii else SHADES
        signs = f"a sign is {2 * scale} x {scale}: {shades[0]} none may look, {shades[1:4]} some, {shades[4]} all"
    elif ascii:
        signs = f"{PLAIN[4]} may look, {PLAIN[0]} may not"
    else:
        signs = f"two queries in a line: {HALVES[3]} both may look, {HALVES[2]} the upper, {HALVES[1]} the lower"
    return f"rows are queries, columns are keys; {signs}"


def _facts(pattern: Pattern, length: int) -> str:
    count = pairs(pattern, length) / length
    facts = f"{length} positions, a query looks at {count:.4g} keys on average"
    if not pattern.causal:
        return f"{facts}, also ahead"
    return f"{facts}, never ahead, and a cache of {slots(pattern, length, 1).counts[length - 1]} is enough"
