"""Means of weights: a moving one over the steps, and one over checkpoints.

    moving     a <- d a + (1 - d) w,     d = min(decay, (1 + step) / (10 + step)): what came first is soon forgotten
    mean       w = (w_1 + ... + w_n) / n

Polyak & Juditsky 1992. Of the last checkpoints: Vaswani et al. 2017, arXiv:1706.03762.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.native import private


class ExponentialMovingAverage:
    """The exponential moving average of some parameters; with a decay of 0 there is none, and nothing happens here."""

    def __init__(self, parameters: list[nn.Parameter], decay: float):
        self.decay, self.parameters = decay, parameters if decay else []
        self.values = [p.detach().clone() for p in self.parameters]

    def follow(self, step: int) -> None:
        if self.values:
            decay = min(self.decay, (1 + step) / (10 + step))
            with torch.no_grad():
                private.foreach_lerp_(self.values, list[Tensor](self.parameters), 1 - decay)

    def swap(self) -> None:
        """The average into the model, and the model's own weights here; once more undoes it."""
        with torch.no_grad():
            for value, parameter in zip(self.values, self.parameters, strict=True):
                own = parameter.clone()
                parameter.copy_(value)
                value.copy_(own)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """For a while, the model is the average."""
        self.swap()
        try:
            yield
        finally:
            self.swap()


def mean(files: list[Path]) -> dict[str, Tensor]:
    """Of the tensors of some safetensors files, by name; whole numbers are those of the last."""
    total: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    for file in files:
        last = load_file(str(file))
        for name, tensor in last.items():
            if tensor.is_floating_point():
                total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return last | {name: (tensor / len(files)).to(last[name].dtype) for name, tensor in total.items()}
