"""Subspace attention: queries, keys and values share one projection, so that attention compresses the vectors towards a
few subspaces, one per head.

    u = U x,     o_i = sum over j allowed of  softmax_j(u_i . u_j / sqrt(dim))  u_j    in each head,     y = W_out o

It is a step of gradient descent on the coding rate within the subspaces, which `regard.look.rate` measures.
Yu et al. 2023, "White-Box Transformers via Sparse Rate Reduction" (CRATE), arXiv:2306.01129.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from regard.core import Context, Cost, Growth, Mixer, Pattern, Place, Position, UserError, part


class Subspace(Mixer[tuple]):
    """Attention whose queries, keys and values are the same vectors.

    dim:            dimension of a subspace; None: width / heads.
    pattern:        which keys each query may attend to; causal in a decoder.
    position:       position that acts on queries, keys or scores; "shared": the one of the stack.
    bias:           the output projection has a bias; the subspaces have none.
    weight_dropout: dropout on the attention weights.
    """

    examples = (
        {"pattern": "everything"},
        {"dim": 5},
        {"pattern": "causal & window(5)", "position": "rotary", "bias": False},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int | None = None,
        pattern: Pattern | str = "causal",
        position: Position | str | dict = "none",
        bias: bool = True,
        weight_dropout: float = 0.0,
        place: Place | None = None,
    ):
        super().__init__()
        if dim is None and width % heads:
            raise UserError(f"width {width} is not divisible by {heads} heads: change one, or give dim")
        self.width, self.heads, self.dim = width, heads, dim or width // heads
        inner = heads * self.dim
        self.into = nn.Linear(width, inner, bias=False)
        arguments = {"pattern": pattern, "position": position, "weight_dropout": weight_dropout, "bias": bias}
        spec = {"part": "attention", "project": "o", **arguments}
        self.attention = part(Mixer, spec, width=inner, heads=heads, dim=self.dim, place=place)
        if inner != width:
            self.attention.out = nn.Linear(inner, width, bias=bias)
            nn.init.xavier_uniform_(self.attention.out.weight)
        nn.init.xavier_uniform_(self.into.weight)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.attention.streams

    @property
    def pattern(self) -> Pattern:
        return self.attention.pattern

    def codes(self, x: Tensor) -> Tensor:
        """Project x (batch, time, width) to the subspaces: (batch, heads, time, dim)."""
        return self.into(x).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)

    def start(self, context: Context, capacity: int) -> tuple:
        return self.attention.start(context, capacity)

    def step(self, x: Tensor, state: tuple, context: Context) -> tuple[Tensor, tuple]:
        return self.attention.step(self.into(x), state, context)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.attention(self.into(x), context)

    def cost(self, length: int, past: int = 0) -> Cost:
        inner = self.attention.cost(length, past)
        return Cost(2 * length * self.into.weight.numel() + inner.flops, inner.state)

    def growth(self) -> Growth:
        return self.attention.growth()

    def value_path(self) -> Iterator[Tensor]:
        yield self.into.weight
        yield from self.attention.value_path()
