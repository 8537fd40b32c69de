"""Other people's weights, both directions, rules as data: regard/convert/families holds a file for each family."""

from .convert import Converted, convert
from .family import Family, every_family, family_of

__all__ = ["Converted", "Family", "convert", "every_family", "family_of"]
