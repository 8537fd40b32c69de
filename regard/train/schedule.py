"""Learning rate schedules: the factor of the peak learning rate at a step and a share of the run."""

import math

MAX_WARMUP_SHARE = 0.5  # of a run


def factor(kind: str, step: int, warmup: int, progress: float, floor: float = 0.0) -> float:
    """Return the factor of the peak learning rate. `step` counts from 1; `progress` in 0..1 is the share of the run
    that is over.

    inverse_sqrt    min(step / warmup, sqrt(warmup / step)): Vaswani et al. 2017, where the peak is
                    1 / sqrt(width warmup); here it is given
    cosine, linear  linear warmup, then down to `floor` at the end of the run
    constant        linear warmup, then constant

    Warmup takes at most half of the run.
    """
    progress = min(progress, 1.0)
    if step < warmup and progress < MAX_WARMUP_SHARE:
        return max(step / warmup, progress / MAX_WARMUP_SHARE)
    if kind == "inverse_sqrt":
        return math.sqrt(min(max(warmup, 1) / step, 1.0))
    if kind == "constant":
        return 1.0
    warm = min(progress * warmup / step, MAX_WARMUP_SHARE)  # the share of the run that the warm-up took
    after = min((progress - warm) / (1 - warm), 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * after)) if kind == "cosine" else 1 - after
    return floor + (1 - floor) * shape
