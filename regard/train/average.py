"""Averages of weights: an exponential moving average over steps, and the mean over checkpoints.

    moving average   a <- d a + (1 - d) w,   d = min(decay, (1 + step) / (10 + step)), so that early weights fade soon
    mean             w = (w_1 + ... + w_n) / n

Polyak & Juditsky 1992. The mean of the last checkpoints: Vaswani et al. 2017, arXiv:1706.03762.
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
    """The exponential moving average of parameters. With a decay of 0 every method does nothing."""

    def __init__(self, parameters: list[nn.Parameter], decay: float):
        self.decay, self.parameters = decay, parameters if decay else []
        self.values = [p.detach().clone() for p in self.parameters]

    def update(self, step: int) -> None:
        if self.values:
            decay = min(self.decay, (1 + step) / (10 + step))
            with torch.no_grad():
                private.foreach_lerp_(self.values, list[Tensor](self.parameters), 1 - decay)

    def swap(self) -> None:
        """Exchange the averages with the model's weights. A second call undoes the first."""
        with torch.no_grad():
            for value, parameter in zip(self.values, self.parameters, strict=True):
                own = parameter.clone()
                parameter.copy_(value)
                value.copy_(own)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the model have the averaged weights inside the `with` block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()


def average_checkpoints(files: list[Path]) -> dict[str, Tensor]:
    """Return the mean of each tensor over safetensors files, by name. Integer tensors come from the last file."""
    total: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    for file in files:
        last = load_file(str(file))
        for name, tensor in last.items():
            if tensor.is_floating_point():
                total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return last | {name: (tensor / len(files)).to(last[name].dtype) for name, tensor in total.items()}
