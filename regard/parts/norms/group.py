"""Group normalization: the channels of each position are centered and scaled in groups, each by its own statistics.

With as many groups as heads, every head is normalized by itself, as in RetNet. Wu & He 2018, arXiv:1803.08494.
"""

from torch import Tensor, nn

from regard.core import Norm, UserError


class Group(Norm):
    """groups: number of groups, each of width / groups adjacent channels.
    gain:      there is a learned gain and bias per channel.
    """

    examples = ({"groups": 4}, {"groups": 3, "gain": False})

    def __init__(self, width: int, groups: int, eps: float = 1e-5, gain: bool = True):
        super().__init__()
        if groups < 1 or width % groups:
            raise UserError(f"width {width} is not divisible into {groups} groups: change one of them")
        self.inner = nn.GroupNorm(groups, width, eps, affine=gain)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.inner(x.flatten(0, -2)).view_as(x)
