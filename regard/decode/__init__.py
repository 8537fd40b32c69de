"""From a trained model to sequences: one strategy per file, all through the model's own steps and state."""

from .beam import beam
from .result import Hypothesis, Request
from .sample import greedy, sample, stream
from .several import Several
from .speculative import Before, Smaller, speculate
from .way import Way, search

__all__ = [
    "Before", "Hypothesis", "Request", "Several", "Smaller", "Way", "beam", "greedy", "sample", "search", "speculate",
    "stream",
]  # fmt: skip
