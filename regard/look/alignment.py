"""Where a decoder looked while it said each token, as a picture: source across, answer down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regard.core import UserError

from . import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import, and needed for images alone

LARGEST = 60  # tokens of a side that are all named; of longer ones every second, third, ...
WIDE = ("Noto Sans CJK SC", "WenQuanYi Zen Hei", "Arial Unicode MS", "PingFang SC", "Microsoft YaHei")  # with Chinese
SHOWN = {" ": "␣", "\n": "↵", "\t": "⇥"}


def png(
    weights: Sequence[Sequence[float]], source: Sequence[str], target: Sequence[str], path: str | Path, title: str = ""
) -> Path:
    """Into a file, renamed when it is done: never half a picture."""
    path = picture.place(path)
    return picture.write(figure(weights, source, target, title), path, 130)


def figure(weights: Sequence[Sequence[float]], source: Sequence[str], target: Sequence[str], title: str = "") -> Figure:
    """weights (target, source), each row about 1 in sum; dark where it looked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import fontManager

    if not source or not target or len(weights) != len(target) or any(len(row) != len(source) for row in weights):
        raise UserError(f"an alignment of {len(target)} by {len(source)} tokens needs as many weights, and some")
    wide, high = (min(0.4 * len(side), 0.16 * LARGEST + 0.02 * len(side)) for side in (source, target))
    drawn = Figure(figsize=(max(2.2 + wide, 3.2), max(1.0 + high, 2.2)), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    fonts = ["DejaVu Sans", *(font for font in fontManager.get_font_names() if font in WIDE)]
    most = max(0.5, *(max(row) for row in weights))
    image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=most, aspect="auto", interpolation="nearest")
    for axis, side in ((axes.xaxis, source), (axes.yaxis, target)):
        every = -(-len(side) // LARGEST)
        axis.set_ticks(range(0, len(side), every), [_shown(token) for token in side[::every]])
    upright = sum(map(len, source)) <= 2.5 * len(source) and len(source) <= LARGEST // 2
    axes.tick_params(axis="x", labelrotation=0 if upright else 90)
    axes.tick_params(labelfontfamily=fonts)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    if max(len(source), len(target)) <= LARGEST:  # a grid between the tokens
        axes.set_xticks([i - 0.5 for i in range(1, len(source))], minor=True)
        axes.set_yticks([i - 0.5 for i in range(1, len(target))], minor=True)
        axes.grid(which="minor", color="0.9", linewidth=0.5)
        axes.tick_params(which="minor", length=0, top=False)
    drawn.colorbar(image, ax=axes, label="share of attention", fraction=0.05)
    if title:
        axes.set_title(title, parse_math=False, family=fonts)
    return drawn


def _shown(token: str) -> str:
    """So that spaces and line ends can be seen, and dollars mean nothing."""
    shown = "".join(SHOWN.get(sign, sign) for sign in token) if token.isspace() else token.strip()
    return shown.replace("$", r"\$")
