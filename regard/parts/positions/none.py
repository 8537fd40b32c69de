"""No position: the order of a sequence is known only through what the mixers do with it."""

from regard.core import Position


class None_(Position):
    """Does nothing."""

    relative = True
