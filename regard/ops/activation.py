"""Activation functions by the names that recipes use."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UserError, nearest


def relu_squared(x: Tensor) -> Tensor:
    """So et al. 2021, "Primer", arXiv:2109.08668."""
    return F.relu(x).square()


def gelu_quick(x: Tensor) -> Tensor:
    """Hendrycks & Gimpel 2016, arXiv:1606.08415: the sigmoid form."""
    return x * torch.sigmoid(1.702 * x)


def identity(x: Tensor) -> Tensor:
    return x


# Named functions, so that a model can be pickled.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_squared": relu_squared,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_quick": gelu_quick,
    "silu": F.silu,
    "elu": F.elu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": identity,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise UserError(f"unknown activation '{name}'{nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]
