"""The plain dot product.

    score = q . k

Luong et al. 2015, arXiv:1508.04025. T5 uses it too, with the scale folded into its initialization.
"""

from regard.core import Score


class Dot(Score):
    """Query projections are initialized smaller by sqrt(dim), so that the softmax is not sharp before training."""

    def __init__(self, dim: int = 1):
        super().__init__()
        self.birth, self.factor = dim**-0.5, 1.0
