"""A profile as a picture: who takes how long, forward and backward, and what waits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regard.profile import Step

from . import picture

SHOWN = 16  # parts in a picture


def png(steps: Sequence[tuple[str, Step]], path: str | Path) -> Path:
    """One panel for each step, under its title."""
    from matplotlib.figure import Figure

    path = picture.place(path)
    heights = [min(len(step.rows), SHOWN) + 2 for _, step in steps]
    drawn = Figure(figsize=(9, 0.3 * sum(heights) + 0.6), layout="constrained")
    panels = drawn.subplots(len(steps), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, step) in zip(panels, steps, strict=True):
        rows = step.rows[:SHOWN][::-1]
        names = [row.part for row in rows]
        ahead = [1000 * row.forward for row in rows]
        axes.barh(names, ahead, label="forward", color="#4878a8")
        if any(row.backward for row in rows):
            axes.barh(names, [1000 * row.backward for row in rows], left=ahead, label="backward", color="#e0995e")
            axes.legend(loc="lower right")
        axes.set(title=f"{title}: {1000 * step.seconds:.1f} ms", xlabel="milliseconds")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return picture.write(drawn, path, 130)
