"""Convert weights from and to the Hugging Face layout. regard/convert/families holds the rules, a file per family."""

from .convert import Converted, convert
from .family import Family, every_family, family_of

__all__ = ["Converted", "Family", "convert", "every_family", "family_of"]
