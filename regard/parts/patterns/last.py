"""Every query attends to the last `count` keys of a sequence of known length, such as the [SEP] at the end of
fixed-size inputs.

    of - count <= key < of

For encoders only: a decoder does not know the final length in advance.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError
from regard.pattern.algebra import check_int


@dataclass(frozen=True)
class Last(Pattern):
    """count: number of keys.
    of:    length of the sequence.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"count": 5, "of": 33},)
    count: int
    of: int

    def __post_init__(self) -> None:
        check_int("last.count", self.count, 1)
        check_int("last.of", self.of, 1)
        if self.count > self.of:
            raise UserError(f"the last {self.count} positions of a sequence of {self.of} are more than it has")

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return torch.broadcast_tensors(self._is_last(key_at), query_at)[0]

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return torch.broadcast_tensors(self._is_last(key_at), now)[0]

    def _is_last(self, key_at: Tensor) -> Tensor:
        return (key_at >= self.of - self.count) & (key_at < self.of)
