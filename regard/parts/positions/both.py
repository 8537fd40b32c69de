"""Two positions combined, such as rotary queries and keys with a learned bias on the scores.

    q -> two(one(q))      k -> two(one(k))      bias = bias of one + bias of two

Hua et al. 2022, "Transformer Quality in Linear Time", arXiv:2202.10447, rotates queries and keys and adds a T5
bias.
"""

from torch import Tensor

from regard.core import Position, UserError, part
from regard.schema import name_of


class Both(Position):
    """one, two: positions that act in attention. At most one of them may compute its bias from the query."""

    examples = (
        {"one": "rotary", "two": "t5"},
        {"one": {"part": "rotary", "fraction": 0.5}, "two": "alibi"},
        {"one": "rotary", "two": "shaw"},
    )

    def __init__(self, width: int, heads: int, dim: int, one: Position | str | dict, two: Position | str | dict):
        super().__init__()
        self.one, self.two = (part(Position, spec, width=width, heads=heads, dim=dim) for spec in (one, two))
        for position in (self.one, self.two):
            if position.acts("embed"):
                raise UserError(f"position '{name_of(position)}' acts on token vectors: name it in the embed")
        if self.one.needs_query and self.two.needs_query:
            raise UserError("only one of the two positions may compute its bias from the query")
        self.relative = self.one.relative and self.two.relative
        self.needs_query = self.one.needs_query or self.two.needs_query

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        return self.two.query(self.one.query(q, at), at)

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return self.two.key(self.one.key(k, at), at)

    def bias_query(self, q: Tensor) -> Tensor:
        return (self.one if self.one.needs_query else self.two).bias_query(q)

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor | None:
        return _sum(*(position.bias(query_at, key_at, q) for position in (self.one, self.two)))

    def output_bias(self, weights: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor | None:
        return _sum(*(position.output_bias(weights, query_at, key_at) for position in (self.one, self.two)))

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        return self.one.flops(queries, keys, pairs) + self.two.flops(queries, keys, pairs)

    def acts(self, place: str) -> bool:
        return self.one.acts(place) or self.two.acts(place)


def _sum(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    if one is None or two is None:
        return two if one is None else one
    return one + two
