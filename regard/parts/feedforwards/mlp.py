"""The feed-forward of the original Transformer: two linear layers with an activation between them.

    y = W_2 act(W_1 x + b_1) + b_2

Vaswani et al. 2017, arXiv:1706.03762.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from regard.core import Context, Cost, Dropout, Norm, Pointwise, part
from regard.core.fusion import FusedMlp
from regard.ops.activation import activation as activation_function
from regard.ops.dispatch import inside_touched, plain_linears
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
        if self._plain and plain_linears(self.into, self.out):
            into, out = self.into, self.out
            return mlp(x, into.weight, into.bias, self.activation, out.weight, out.bias)
        return self.out(self.norm(self.drop(self.activate(self.into(x))), context.valid))

    def fused(self) -> FusedMlp | None:
        return FusedMlp(self.into, self.out, self.activation) if self._plain else None

    @property
    def _plain(self) -> bool:
        """Whether there is nothing between the two linear layers but an activation that `ops.mlp` can fuse."""
        drops = self.training and self.drop.rate
        return self.activation in FUSED_ACTIVATIONS and self.norm.is_identity and not drops and not inside_touched(self)

    def cost(self, length: int, past: int = 0) -> Cost:
        return Cost(2 * length * (self.into.weight.numel() + self.out.weight.numel()), 0)

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.into.weight, self.out.weight)
