"""Decoding strategies, one per file, all through the model's own steps and state."""

from .beam import beam
from .config import DecodeConfig, search
from .ensemble import Ensemble
from .result import Hypothesis, Request
from .sample import greedy, sample, stream
from .speculative import ModelDraft, NgramDraft, speculate

__all__ = [
    "DecodeConfig", "Ensemble", "Hypothesis", "ModelDraft", "NgramDraft", "Request", "beam", "greedy", "sample",
    "search", "speculate", "stream",
]  # fmt: skip
