"""No position: the model knows the order of a sequence only through its mixers."""

from regard.core import Position


class None_(Position):
    relative = True
