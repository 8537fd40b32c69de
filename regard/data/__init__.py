"""Turn files into records, records into tokens and tokens into batches. Each step can be used alone."""

from .batches import (
    FIRST_LABEL,
    IGNORE,
    Batch,
    Batches,
    BucketedBatches,
    LabeledBatches,
    ResumableBatches,
    WindowBatches,
    first_epoch,
)
from .prepare import PreparedDataset, prepare, prepare_text
from .read import KINDS, Corpus, CorpusSplit, open_corpus, overlap
from .tokenizer import Tokenizer

__all__ = [
    "FIRST_LABEL",
    "IGNORE",
    "KINDS",
    "Batch",
    "Batches",
    "BucketedBatches",
    "Corpus",
    "CorpusSplit",
    "LabeledBatches",
    "PreparedDataset",
    "ResumableBatches",
    "Tokenizer",
    "WindowBatches",
    "first_epoch",
    "open_corpus",
    "overlap",
    "prepare",
    "prepare_text",
]  # fmt: skip
