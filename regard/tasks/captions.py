"""Match images with texts: two towers learn from images with a text each, and predict which belong together.

run = regard.load("runs/clip")
run.match(["a.png", "b.png"], ["a photo of a cat", "a photo of a dog"])       # (images, texts), each row sums to 1
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import metrics as measures
from regard.core import Towers, UserError
from regard.data import Tokenizer, first_epoch
from regard.data.batches import Batch, pad_rows
from regard.data.images import ImageProcessor, default_processor
from regard.data.pictures import ImageBatches, ImageCorpus, LabeledImages, open_images, prepare_images
from regard.decode import DecodeConfig
from regard.parts.objectives.contrastive import Contrastive, similarity_logits, symmetric_cross_entropy
from regard.parts.objectives.objective import Objective

from .images import BATCH_SIZE, in_chunks, load_split, processor_for, top_labels
from .reader import truncated
from .run import Prediction
from .task import Say, Task, Tick, no_progress, say_nothing

EVAL_BATCH_SIZE = 64  # pairs among which each image must find its text in an evaluation
INDEX_BITS = 24  # bits of the index of an image; the hash of its text is above them


class ImageTextMatcher:
    """Predicts which of some texts belongs to an image; the counterpart of `Run`.

    text:      the candidate texts, for `answers`.
    processor: prepares images; None: the one of the run folder.
    """

    pairs = False
    takes, options = "images", ("num_return", "text", "truncate")
    metrics = ("loss", "accuracy")

    def __init__(
        self,
        model: Towers,
        source: Tokenizer,
        target: Tokenizer,
        folder: Path | None = None,
        note: str = "",
        processor: ImageProcessor | None = None,
    ):
        self.model, self.source, self.folder, self.note = model.eval(), source, folder, note
        self.device = next(model.parameters()).device
        self.processor = processor_for(folder, model.image, clip=True) if processor is None else processor
        self.text: list[str] = []

    @property
    def config(self) -> DecodeConfig:
        """Return a config that asks for all texts, the most likely first."""
        count = max(len(self.text), 1)
        return DecodeConfig(beam=count, num_return=count)

    def read(self, files: Iterable[str | Path]) -> list[Path]:
        """Return the paths of image files, which are opened later, a few at a time."""
        return [Path(file) for file in files]

    def predict(
        self, files: Iterable[str | Path], config: DecodeConfig | None = None, text: Sequence[str] | None = None
    ) -> list[list[Prediction]]:
        """Return for every image the texts, the most likely first."""
        self.text = self.text if text is None else list(text)
        return list(self.answers(files, config))

    def answers(
        self,
        files: Iterable[str | Path],
        config: DecodeConfig | None = None,
        attention: bool = False,
        read_ahead: int = BATCH_SIZE,
        tick: Callable[[int], None] = lambda done: None,
    ) -> Iterator[list[Prediction]]:
        """Yield the predictions of `predict` one image at a time."""
        config = config or self.config
        if not self.text:
            raise UserError("which texts? Say --text for everything that a picture may show")
        texts = self.embed(self.text, config.truncate)
        yield from top_labels(
            files,
            self.text,
            lambda some: self.model.similarity(self._image_vectors(some), texts),
            config.num_return,
            tick,
        )

    @torch.no_grad()
    def match(self, files: Iterable[str | Path], texts: Sequence[str], truncate: bool = False) -> Tensor:
        """Return the probability of each text for each image, among these texts, (images, texts)."""
        return self.model.similarity(self.vectors(files), self.embed(texts, truncate)).softmax(-1).cpu()

    def vectors(self, files: Iterable[str | Path]) -> Tensor:
        """Return the normalized vectors of images, (images, dim)."""
        made = [self._image_vectors(some) for some in in_chunks(files)]
        if not made:
            raise UserError("there is no picture to make a vector of")
        return torch.cat(made)

    @torch.no_grad()
    def embed(self, texts: Sequence[str], truncate: bool = False) -> Tensor:
        """Return the normalized vectors of texts, (texts, dim), comparable with those of images."""
        if isinstance(texts, str) or not texts:
            raise UserError("texts come in a list of one at least")
        tokens, valid = pad_rows(self.encode_inputs(texts, truncate), self.source.pad)
        return self.model.encode_texts(tokens.to(self.device), valid.to(self.device))

    def encode_inputs(self, texts: Sequence[str], truncate: bool) -> list[list[int]]:
        """Return the token ids of texts with special tokens. A text that is too long for the model is truncated, or
        refused."""
        rows, limit = self.source.encode_with_special_tokens(texts), self.model.limit
        if limit is None:
            return rows
        for text, ids in zip(texts, rows, strict=True):
            if len(ids) > limit and not truncate:
                raise UserError(
                    f"the text '{text[:40]}...' has {len(ids):,} tokens, and at most {limit:,} can be taken: shorten "
                    "it, or let it be cut (--truncate)"
                )
        return [truncated(ids, limit) for ids in rows]

    @torch.no_grad()
    def _image_vectors(self, files: list[str | Path]) -> Tensor:
        return self.model.encode_images(self.processor.load(files).to(self.device))

    def stream(self, file: str | Path, config: DecodeConfig | None = None) -> Iterator[str]:
        yield self.predict([file], config)[0][0].text

    def examples(self, asked: dict[str, Any], part: str) -> LabeledImages:
        """Return a split of some data, or of the training data."""
        return load_split(self.model, asked, part, texts=True)

    def evaluate(self, examples: LabeledImages, names: Sequence[str]) -> dict[str, Any]:
        """Return the result of regard.evaluate; accuracy is the percentage of images that find their text among at most
        64."""
        measures.check(names, self.metrics)
        begun = time.perf_counter()
        found = measure_batches(self.model, self._image_batches(examples), self.device)
        scores = {name: found[name] for name in names}
        seconds = {"pictures": time.perf_counter() - begun}
        return {"scores": scores, "signatures": {}, "counts": {"pictures": len(examples)}, "seconds": seconds}

    def _image_batches(self, examples: LabeledImages) -> Iterator[Batch]:
        for begin in range(0, len(examples), EVAL_BATCH_SIZE):
            some = range(begin, min(begin + EVAL_BATCH_SIZE, len(examples)))
            images = torch.stack(
                [self.processor.normalize(self.processor.resize_and_crop(examples.image(n))) for n in some]
            )
            tokens, valid = pad_rows(self.encode_inputs([examples.answers[n] for n in some], True), self.source.pad)  # type: ignore
            yield Batch(tokens, torch.arange(len(some)), valid, images, count=len(some))


@torch.no_grad()
def measure_batches(model: Towers, batches: Iterable[Batch], device: torch.device | str) -> dict[str, float]:
    """Return the loss per pair, and the percentage of images that find their own text among those of the batch."""
    loss, right, count = 0.0, 0, 0
    for batch in batches:
        scores = similarity_logits(model, batch.to(device))
        loss += float(symmetric_cross_entropy(scores))
        right += int((scores.argmax(1) == torch.arange(len(scores), device=scores.device)).sum())
        count += len(scores)
    return {"loss": loss / count, "accuracy": 100 * right / count}


class CaptionBatches:
    """Batches of images with their texts. rows: the token ids of all texts, by index."""

    def __init__(self, seen: ImageBatches, rows: list[list[int]], pad: int):
        self.seen, self.rows, self.pad, self.epoch = seen, rows, pad, seen.epoch

    def make(self, numbers: np.ndarray) -> Batch:
        batch = self.seen.make(numbers)
        which = (batch.targets & ((1 << INDEX_BITS) - 1)).tolist()
        tokens, valid = pad_rows([self.rows[number] for number in which], self.pad)
        return Batch(tokens, torch.arange(len(which)), valid, source=batch.tokens, count=len(which))


class Captions(Task):
    objective_name = "contrastive"
    kind = "towers"
    predictor = ImageTextMatcher
    reads = "captions"
    loss_metrics = ("loss", "accuracy")
    default_metric = "accuracy"
    file_suffix = "images"

    def open(self, tick: Callable[[int], None]) -> Any:
        job = self.job
        for name in ("source", "target", "columns", "header"):
            if getattr(job, name) is not None:
                raise UserError(f"a table names pictures and their texts, so there is no {name} to give")
        if job.data is None:
            raise UserError("which pictures? Give --data, a .tsv file: a picture's file, a tab and what it shows")
        self.pictures = open_images(job.data, job.dev, job.test, self.settings.seed, texts=True)
        return self.pictures

    def learn_tokenizers(self, corpus: Any, tick: Tick) -> None:
        kind = self.job.tokenizer or self.default_tokenizer
        if kind.endswith(".json"):
            self.source = self.target = Tokenizer.load(kind)
        else:
            made = Tokenizer.train(kind, iter(corpus.train.answers), self.job.vocab, self.job.lowercase)
            self.source = self.target = made

    def complete_recipe(self, recipe: dict[str, Any]) -> None:
        recipe["vocab"] = self.source.size
        recipe["model"]["end"] = self.source.end

    def check_model(self, model: Any) -> None:
        self.processor: ImageProcessor = default_processor(
            model.image.embed.sides, model.image.embed.channels, clip=True
        )

    def run_info(self) -> dict[str, Any]:
        return {"images": self.processor.table()}

    def objective(self) -> Objective:
        return Contrastive()  # type: ignore[return-value]

    def batches(self, model: Any, corpus: ImageCorpus, say: Say, tick: Tick) -> Any:
        s = self.settings
        count = s.batch_size or max(s.batch_tokens // model.image.embed.count, 2)
        return self._prepared(model, corpus.train, "train.images", count, say, tick)

    def dev(self, model: Any, lines: Any) -> Any:
        captioned = self._prepared(model, lines, "dev.images", EVAL_BATCH_SIZE, say_nothing, no_progress, shuffle=False)
        return lambda model: measure_batches(model, first_epoch(captioned), next(model.parameters()).device)

    def _prepared(
        self, model: Towers, examples: LabeledImages, name: str, count: int, say: Say, tick: Tick, shuffle: bool = True
    ) -> Any:
        codes = (number | zlib.crc32(text.encode()) << INDEX_BITS for number, text in enumerate(examples.answers))
        skip = self.job.bad_lines == "skip"
        rows, unreadable = prepare_images(
            examples, codes, self.processor, self.data_path(name), skip, partial(tick, "preparing")
        )
        if unreadable:
            say(f"{examples.name}: {unreadable:,} pictures cannot be read and are left out")
        texts = self.make_predictor(model, None, False).encode_inputs(examples.answers, truncate=True)
        if model.limit and (long := sum(len(ids) == model.limit for ids in texts)):
            say(f"{examples.name}: {long:,} texts fill the {model.limit} tokens that the model takes, and may be cut")
        return CaptionBatches(
            ImageBatches(rows, self.processor, count, self.settings.seed, shuffle), texts, self.source.pad
        )

    def make_predictor(self, model: Any, folder: Path | None, documents: bool) -> Any:
        return ImageTextMatcher(model, self.source, self.target, folder, processor=self.processor)
