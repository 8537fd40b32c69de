"""The dot product as it is.

    score = q . k

Luong et al. 2015, arXiv:1508.04025. T5 uses it too, with the scale hidden in its initial weights.
"""

from regard.core import Score


class Dot(Score):
    """Has nothing to choose. Queries begin smaller by sqrt(dim): no weight is sharp before anything is learned."""

    def __init__(self, dim: int = 1):
        super().__init__()
        self.birth, self.factor = dim**-0.5, 1.0
