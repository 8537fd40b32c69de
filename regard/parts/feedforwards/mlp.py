"""The feed-forward of the original Transformer: two linear maps with an activation between, the same at every position.

    y = W_2 act(W_1 x + b_1) + b_2

Vaswani et al. 2017, arXiv:1706.03762.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from regard.core import Context, Cost, Dropout, Empty, Norm, Pointwise, part
from regard.core.hooks import inside_touched
from regard.core.product import alone, learns, maps
from regard.kernels.activation import activation as activation_function
from regard.native import train
from regard.native.decode import ACTIVATIONS, plan_mlp
from regard.native.structs import FusedBranch


class Mlp(Pointwise):
    """hidden:     channels between the maps; None: four times the width.
    activation:    relu, gelu, gelu_tanh, silu, relu_squared, ...
    norm:          on the hidden channels (sub-LN).
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
        if found := alone(self, x, Empty(), context):
            return found[0]
        if self._plain and (known := learns(x, self.into, self.out)):
            into, out = self.into, self.out
            return train.mlp(known, x, into.weight, into.bias, self.activation, out.weight, out.bias)
        return self.out(self.norm(self.drop(self.activate(self.into(x))), context.valid))

    def plan(self, x: Tensor, state: Empty, context: Context) -> tuple[FusedBranch, Empty] | None:
        modules = self._modules  # which is faster to ask
        fast = maps(x, modules["into"], modules["out"]) if self._plain else None
        return None if fast is None else (plan_mlp(*fast, self.activation, x.shape[0] * x.shape[1]), state)

    def replan(self, branch: FusedBranch, x: Tensor, state: Empty, context: Context) -> Empty:
        return state

    @property
    def _plain(self) -> bool:
        norm: Norm = self._modules["norm"]  # type: ignore[assignment]
        drops = self.training and self.drop.rate
        return self.activation in ACTIVATIONS and norm.idle and not drops and not inside_touched(self)

    def cost(self, length: int, past: int = 0) -> Cost:
        return Cost(2 * length * (self.into.weight.numel() + self.out.weight.numel()), 0)

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.into.weight, self.out.weight)
