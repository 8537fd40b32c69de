"""Files -> records -> tokens -> batches. Each piece can be used alone."""

from .batches import (
    FIRST_LABEL,
    IGNORE,
    Batch,
    Batches,
    BucketedBatches,
    LabeledBatches,
    ResumableBatches,
    Windows,
    once,
)
from .prepare import Sequences, prepare, prepare_text
from .read import KINDS, Corpus, Lines, open_corpus, overlap
from .tokenizer import Tokenizer

__all__ = [
    "FIRST_LABEL", "IGNORE", "KINDS", "Batch", "Batches", "BucketedBatches", "Corpus", "LabeledBatches", "Lines",
    "ResumableBatches", "Sequences", "Tokenizer", "Windows", "once", "open_corpus", "overlap",
    "prepare", "prepare_text",
]  # fmt: skip
