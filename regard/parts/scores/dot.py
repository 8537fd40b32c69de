"""The dot product as it is.

    score = q . k

Luong et al. 2015, arXiv:1508.04025. T5 uses it too, with the scale hidden in its initial weights.
"""

from regard.core import Score


class Dot(Score):
    """Has nothing to choose."""
