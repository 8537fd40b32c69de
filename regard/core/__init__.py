"""The contracts that parts fulfill, and the assembly of parts into models."""

from regard.errors import UserError
from regard.pattern.algebra import Pattern
from regard.schema import add_folder, find, part

from .context import Context, Memory, Tap, losses, watch
from .contracts import Dropout, Embed, Head, Norm, Position, Score
from .length import BLANK, Canvases, Length, source_lengths
from .mixer import Cost, Empty, Growth, Mixer, Pointwise, join, select, state_bytes
from .model import Model
from .passes import Pass
from .recipe import build, load, restore, save
from .stack import Layer, Place, Stack, Wiring
from .state import State
from .towers import Towers, models_in

__all__ = [
    "BLANK", "Canvases", "Context", "Cost", "Dropout", "Embed", "Empty", "Growth", "Head", "Layer", "Length", "Memory",
    "Mixer", "Model", "Norm", "Pass", "Pattern", "Place", "Pointwise", "Position", "Score", "Stack", "State", "Tap",
    "Towers", "UserError", "Wiring", "add_folder", "build", "find", "join", "load", "losses", "models_in", "part",
    "restore", "save", "select", "source_lengths", "state_bytes", "watch",
]  # fmt: skip
