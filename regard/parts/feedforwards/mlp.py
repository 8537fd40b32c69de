"""The feed-forward of the original Transformer: two linear layers with an activation between them.

    y = W_2 act(W_1 x + b_1) + b_2

Vaswani et al. 2017, arXiv:1706.03762.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from regard.core import Context, Cost, Dropout, Norm, Pointwise, part
from regard.core.fusion import FusedMlp
from regard.ops.activation import activation as activation_function
from regard.ops.dispatch import NOT_PLAIN, inside_touched, note, plain_linears
from regard.ops.mlp import FUSED_ACTIVATIONS, mlp


class Mlp(Pointwise):
    """hidden:     hidden channels; None: four times the width.
    activation:    relu, gelu, gelu_tanh, silu, relu_squared, ...
    norm:          norm on the hidden channels (sub-LN).
    """

    examples = ({}, {"activation": "gelu", "norm": "layer", "bias": False})

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        activation: str = "relu",
        bias: bool = True,
        norm: Norm | str | dict = "none",
        hidden_dropout: float = 0.0,
    ):
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        self.width = width
        self.into, self.out = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.activation, self.activate = activation, activation_function(activation)
        self.norm = part(Norm, norm, width=hidden)
        self.drop = Dropout(hidden_dropout)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        why = self._why_not_plain or ("" if plain_linears(self.into, self.out) else NOT_PLAIN)
        if not why:
            into, out = self.into, self.out
            return mlp(x, into.weight, into.bias, self.activation, out.weight, out.bias)
        note("mlp", why)
        return self.out(self.norm(self.drop(self.activate(self.into(x))), context.valid))

    def fused(self) -> FusedMlp | None:
        return None if self._why_not_plain else FusedMlp(self.into, self.out, self.activation)

    @property
    def _why_not_plain(self) -> str:
        """Why there is more between the two linear layers than an activation that `ops.mlp` can fuse; an empty string
        where there is not."""
        if self.activation not in FUSED_ACTIVATIONS:
            return "the kernel does not know its activation"
        if not self.norm.is_identity:
            return "there is a norm between the two linear layers"
        if self.training and self.drop.rate:
            return "hidden channels are dropped out"
        return "a module in it has a hook, or a method of its own" if inside_touched(self) else ""

    def cost(self, length: int, past: int = 0) -> Cost:
        return Cost(2 * length * (self.into.weight.numel() + self.out.weight.numel()), 0)

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.into.weight, self.out.weight)
