"""Pictures of the cross-attention of a decoder: source tokens across, generated tokens down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regard.core import UserError

from . import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import, and needed for images alone

MAX_LABELS = 60  # tokens per axis with a label; of more, every second, third, ... is labeled
CJK_FONTS = ("Noto Sans CJK SC", "WenQuanYi Zen Hei", "Arial Unicode MS", "PingFang SC", "Microsoft YaHei")
VISIBLE_SPACES = {" ": "␣", "\n": "↵", "\t": "⇥"}


def png(
    weights: Sequence[Sequence[float]], source: Sequence[str], target: Sequence[str], path: str | Path, title: str = ""
) -> Path:
    """Write the picture as PNG to `path`, atomically."""
    path = picture.check_path(path)
    return picture.write(figure(weights, source, target, title), path, 130)


def figure(weights: Sequence[Sequence[float]], source: Sequence[str], target: Sequence[str], title: str = "") -> Figure:
    """Draw attention weights (target, source) whose rows sum to about 1; dark cells have high weight."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import fontManager

    if not source or not target or len(weights) != len(target) or any(len(row) != len(source) for row in weights):
        raise UserError(f"an alignment of {len(target)} by {len(source)} tokens needs weights of that shape, not empty")
    width, height = (min(0.4 * len(side), 0.16 * MAX_LABELS + 0.02 * len(side)) for side in (source, target))
    chart = Figure(figsize=(max(2.2 + width, 3.2), max(1.0 + height, 2.2)), layout="constrained")
    FigureCanvasAgg(chart)
    axes = chart.add_subplot()
    fonts = ["DejaVu Sans", *(font for font in fontManager.get_font_names() if font in CJK_FONTS)]
    vmax = max(0.5, *(max(row) for row in weights))
    image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=vmax, aspect="auto", interpolation="nearest")
    for axis, side in ((axes.xaxis, source), (axes.yaxis, target)):
        step = -(-len(side) // MAX_LABELS)
        axis.set_ticks(range(0, len(side), step), [_label(token) for token in side[::step]])
    horizontal = sum(map(len, source)) <= 2.5 * len(source) and len(source) <= MAX_LABELS // 2
    axes.tick_params(axis="x", labelrotation=0 if horizontal else 90)
    axes.tick_params(labelfontfamily=fonts)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    if max(len(source), len(target)) <= MAX_LABELS:  # a grid between the tokens
        axes.set_xticks([i - 0.5 for i in range(1, len(source))], minor=True)
        axes.set_yticks([i - 0.5 for i in range(1, len(target))], minor=True)
        axes.grid(which="minor", color="0.9", linewidth=0.5)
        axes.tick_params(which="minor", length=0, top=False)
    chart.colorbar(image, ax=axes, label="share of attention", fraction=0.05)
    if title:
        axes.set_title(title, parse_math=False, family=fonts)
    return chart


def _label(token: str) -> str:
    """Return the token with visible whitespace and escaped dollar signs."""
    label = "".join(VISIBLE_SPACES.get(sign, sign) for sign in token) if token.isspace() else token.strip()
    return label.replace("$", r"\$")
