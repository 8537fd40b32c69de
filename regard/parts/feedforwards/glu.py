"""Gated linear unit: one projection is multiplied by another, which passes through an activation.

    y = W_2 (act(W_g x) * W_1 x)

SwiGLU with silu, GEGLU with gelu, ReGLU with relu, the first GLU with sigmoid, bilinear with identity.
Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202; Dauphin et al. 2017, arXiv:1612.08083.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from regard.core import Context, Cost, Dropout, Norm, Pointwise, part
from regard.core.fusion import FusedMlp
from regard.ops.activation import activation as activation_function
from regard.ops.mlp import FUSED_ACTIVATIONS


class Glu(Pointwise):
    """hidden:     hidden channels; None: 8/3 of the width, which gives as many parameters as mlp with four times the
                   width.
    activation:    activation of the gate: silu, gelu, gelu_tanh, relu, sigmoid, identity, ...
    norm:          norm on the hidden channels (sub-LN).
    """

    examples = ({}, {"activation": "gelu", "norm": "layer", "bias": True, "hidden": 10}, {"activation": "sigmoid"})

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        activation: str = "silu",
        bias: bool = False,
        norm: Norm | str | dict = "none",
        hidden_dropout: float = 0.0,
    ):
        super().__init__()
        hidden = 8 * width // 3 if hidden is None else hidden
        self.width = width
        self.gate, self.into = nn.Linear(width, hidden, bias=bias), nn.Linear(width, hidden, bias=bias)
        self.out = nn.Linear(hidden, width, bias=bias)
        self.activation, self.activate = activation, activation_function(activation)
        self.norm = part(Norm, norm, width=hidden)
        self.drop = Dropout(hidden_dropout)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.out(self.norm(self.drop(self.activate(self.gate(x)) * self.into(x)), context.valid))

    def fused(self) -> FusedMlp | None:
        plain = (
            self.activation in FUSED_ACTIVATIONS and self.norm.is_identity and not (self.training and self.drop.rate)
        )
        return FusedMlp(self.gate, self.out, self.activation, self.into) if plain else None

    def cost(self, length: int, past: int = 0) -> Cost:
        return Cost(2 * length * 3 * self.out.weight.numel(), 0)

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.into.weight, self.out.weight)
