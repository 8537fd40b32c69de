"""How the learning rate moves: a factor of the peak, from the step and from how far the run has come."""

import math

MOST_WARMUP = 0.5  # of a run


def factor(kind: str, step: int, warmup: int, progress: float, floor: float = 0.0) -> float:
    """Of the peak, for `step` counted from 1. `progress` in 0..1 is the share of the run that is over.

    inverse_sqrt    min(step / warmup, sqrt(warmup / step)): Vaswani et al. 2017, with the peak given instead of the
                    width, which there makes it 1 / sqrt(width warmup)
    cosine, linear  linear warm-up, then from the peak down to `floor` at the end of the run
    constant        linear warm-up, then flat

    A warm-up takes half of the run at the most.
    """
    progress = min(progress, 1.0)
    if step < warmup and progress < MOST_WARMUP:
        return max(step / warmup, progress / MOST_WARMUP)
    if kind == "inverse_sqrt":
        return math.sqrt(min(max(warmup, 1) / step, 1.0))
    if kind == "constant":
        return 1.0
    warm = min(progress * warmup / step, MOST_WARMUP)  # the share of the run that the warm-up took
    after = min((progress - warm) / (1 - warm), 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * after)) if kind == "cosine" else 1 - after
    return floor + (1 - floor) * shape
