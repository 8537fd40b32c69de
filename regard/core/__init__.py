"""The contracts that parts fulfill, and the assembly of parts into models."""

from regard.errors import UserError
from regard.pattern.algebra import Pattern
from regard.schema import add_folder, find, part

from .context import Context, Memory
from .dropout import Dropout
from .embed import Embed
from .head import Head
from .mixer import Cost, Empty, Growth, Mixer, Pointwise, join, select, state_bytes
from .model import Model
from .norm import Norm
from .passes import Pass
from .position import Position
from .recipe import build, load, restore, save
from .score import Score
from .stack import Layer, Stack
from .state import State
from .tap import Tap, losses, watch
from .towers import Towers, models_in
from .wiring import Place, Wiring

__all__ = [
    "Context", "Cost", "Dropout", "Embed", "Empty", "Growth", "Head", "Layer", "Memory", "Mixer", "Model", "Norm",
    "Pass", "Pattern", "Place", "Pointwise", "Position", "Score", "Stack", "State", "Tap", "Towers", "UserError",
    "Wiring", "add_folder", "build", "find", "join", "load", "losses", "models_in", "part", "restore", "save",
    "select", "state_bytes", "watch",
]  # fmt: skip
