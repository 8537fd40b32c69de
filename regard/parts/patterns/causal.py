"""Causal attention: a query attends to itself and to earlier keys, as in a decoder."""

from dataclasses import dataclass

from torch import Tensor

from regard.core import Pattern


@dataclass(frozen=True)
class Causal(Pattern):
    @property
    def causal(self) -> bool:
        return True

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return key_at <= query_at
