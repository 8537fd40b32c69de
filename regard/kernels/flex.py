"""Block-sparse attention: gathers only the key blocks that a pattern allows. Works with gradients on every device."""

from torch import Tensor

from regard.core import Position

from .see import See


def can(see: See, drop: float) -> bool:
    return False


def pays(q: Tensor, see: See, drop: float) -> bool:
    return False


def attend(q: Tensor, k: Tensor, v: Tensor, see: See, position: Position, plain: Tensor, drop: float) -> Tensor:
    raise NotImplementedError
