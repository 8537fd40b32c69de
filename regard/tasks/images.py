"""Classify images: an encoder of patches learns from images with one label each.

regard.load("runs/x").predict(["cat.png"])[0][0].text
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import metrics as measures
from regard.core import Context, Model, UserError
from regard.data import Tokenizer, first_epoch
from regard.data.batches import Batch
from regard.data.images import ImageProcessor, PreprocessorConfig, default_processor, from_preprocessor_config
from regard.data.pictures import ImageBatches, ImageCorpus, LabeledImages, open_images, open_split, prepare_images
from regard.decode import DecodeConfig
from regard.files.reading import read_json
from regard.parts.objectives.classify import Classify
from regard.parts.objectives.objective import Objective
from regard.runs.folder import read_run_json

from .reader import top_classes
from .run import Prediction
from .task import DEV_TOKENS, Say, Task, Tick, no_progress, say_nothing

BATCH_SIZE = 16  # images that are computed at a time
PREPROCESSOR = Path("origin") / "preprocessor_config.json"  # in the run folder of a converted model


def processor_for(folder: Path | None, model: Model, clip: bool = False) -> ImageProcessor:
    """Return the image processor of a run: that of its training, that of its original, or the default. model: the image
    encoder."""
    sides, channels = model.embed.sides, model.embed.channels  # type: ignore[union-attr]
    if folder is not None:
        info = read_run_json(folder)
        if "images" in info:
            return ImageProcessor.read(info["images"])
        path = folder / PREPROCESSOR
        if path.is_file():
            return from_preprocessor_config(read_json(path, PreprocessorConfig), channels)
    return default_processor(sides, channels, clip)


def in_chunks(files: Iterable[str | Path]) -> Iterator[list[str | Path]]:
    """Yield files in lists of BATCH_SIZE."""
    if isinstance(files, str | Path):
        raise UserError("pictures come in a list: for a single one, say [file]")
    left = iter(files)
    while some := list(islice(left, BATCH_SIZE)):
        yield some


def top_labels(
    files: Iterable[str | Path],
    names: Sequence[str],
    scores: Callable[[list[str | Path]], Tensor],
    best: int,
    tick: Callable[[int], None],
) -> Iterator[list[Prediction]]:
    """Yield for every image the `best` most likely names. scores: returns the logits of a list of files, (images,
    names)."""
    for some in in_chunks(files):
        for found in top_classes(scores(some), best):
            named = [(names[number], log) for number, log in found]
            yield [Prediction(name, log, log, [name], True) for name, log in named]
        tick(len(some))


def load_split(model: Any, asked: dict[str, Any], part: str, texts: bool = False) -> LabeledImages:
    """Return a split of some data. asked: the entries of a Job, and `own`, whether it is the run's own data; part:
    train, dev or test."""
    if asked.get("data") is None:
        raise UserError("which pictures? Name them with --data")
    if asked.get("own", True):
        seed = getattr(model, "recipe", {}).get("train", {}).get("seed", 1)
        found = getattr(open_images(asked["data"], asked.get("dev"), asked.get("test"), seed, texts), part)
    else:
        found = open_split(asked["data"], part, texts)
    if found is None:
        raise UserError(f"there is no {part} part among these pictures")
    return found


class ImageClassifier:
    """Predicts the label of an image; the counterpart of `Run`.

    processor: prepares images; None: the one of the run folder.
    labels:    the names of the classes; None: those of the run folder, else their numbers.
    """

    pairs = False
    takes, options = "images", ("num_return",)
    metrics = ("loss", "accuracy")

    def __init__(
        self,
        model: Model,
        folder: Path | None = None,
        note: str = "",
        processor: ImageProcessor | None = None,
        labels: Sequence[str] | None = None,
    ):
        self.model, self.folder, self.note = model.eval(), folder, note
        self.device = next(model.parameters()).device
        self.config = DecodeConfig()
        self.processor = processor_for(folder, model) if processor is None else processor
        classes = getattr(model.head, "classes", 0)
        known = labels if labels is not None else read_run_json(folder).get("labels") if folder is not None else None
        self.labels = [str(number) for number in range(classes)] if known is None else list(known)
        if len(self.labels) != classes:
            raise UserError(f"there are {len(self.labels)} labels, and the model has {classes} classes")

    def read(self, files: Iterable[str | Path]) -> list[Path]:
        """Return the paths of image files, which are opened later, a few at a time."""
        return [Path(file) for file in files]

    def predict(self, files: Iterable[str | Path], config: DecodeConfig | None = None) -> list[list[Prediction]]:
        """Return for every image its most likely labels, best first."""
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
        if not self.labels:
            raise UserError("this model has no labels: it gives vectors, for which there is run.vectors([...])")
        yield from top_labels(files, self.labels, self._logits, config.num_return, tick)

    def vectors(self, files: Iterable[str | Path]) -> Tensor:
        """Return the hidden states from which labels are predicted, (images, width)."""
        made = [self._hidden(some) for some in in_chunks(files)]
        if not made:
            raise UserError("there is no picture to make a vector of")
        return torch.cat(made).cpu()

    @torch.no_grad()
    def _logits(self, files: list[str | Path]) -> Tensor:
        return self.model(self.processor.load(files).to(self.device))

    @torch.no_grad()
    def _hidden(self, files: list[str | Path]) -> Tensor:
        images = self.processor.load(files).to(self.device)
        context = Context.begin(*self.model.embed.extent(images), self.device)
        return self.model.hidden(images, context)[:, 0]

    def stream(self, file: str | Path, config: DecodeConfig | None = None) -> Iterator[str]:
        yield self.predict([file], config)[0][0].text

    def examples(self, asked: dict[str, Any], part: str) -> LabeledImages:
        """Return a split of some data, or of the training data."""
        return load_split(self.model, asked, part)

    def evaluate(self, examples: LabeledImages, names: Sequence[str]) -> dict[str, Any]:
        """Return the result of regard.evaluate; accuracy is in percent."""
        measures.check(names, self.metrics)
        begun = time.perf_counter()
        numbers = {label: number for number, label in enumerate(self.labels)}
        for label in examples.answers:
            if label not in numbers:
                raise UserError(f"{examples.name}: the model knows no class '{label}'")
        found = measure_batches(self.model, _image_batches(examples, numbers, self.processor), self.device)
        scores = {name: found[name] for name in names}
        seconds = {"pictures": time.perf_counter() - begun}
        return {"scores": scores, "signatures": {}, "counts": {"pictures": len(examples)}, "seconds": seconds}


def _image_batches(examples: LabeledImages, numbers: dict[str, int], processor: ImageProcessor) -> Iterator[Batch]:
    """Yield batches of images, which are read as they are needed."""
    for begin in range(0, len(examples), BATCH_SIZE):
        some = range(begin, min(begin + BATCH_SIZE, len(examples)))
        images = torch.stack([processor.normalize(processor.resize_and_crop(examples.image(n))) for n in some])
        targets = torch.tensor([numbers[examples.answers[n]] for n in some])
        yield Batch(images, targets, count=len(some))


@torch.no_grad()
def measure_batches(model: Model, batches: Iterable[Batch], device: torch.device | str) -> dict[str, float]:
    """Return the loss per image, and the accuracy in percent."""
    loss, right, count = 0.0, 0, 0
    for batch in batches:
        batch = batch.to(device)
        scores = model(batch.tokens).float()
        loss += float(F.cross_entropy(scores, batch.targets, reduction="sum"))
        right += int((scores.argmax(-1) == batch.targets).sum())
        count += len(batch.targets)
    return {"loss": loss / count, "accuracy": 100 * right / count}


class Images(Task):
    objective_name = "classify"
    inputs = "images"
    predictor = ImageClassifier
    reads = "images"
    loss_metrics = ("loss", "accuracy")
    default_metric = "accuracy"
    file_suffix = "images"

    @property
    def tokenizers(self) -> list[Tokenizer]:
        return []

    def open(self, tick: Callable[[int], None]) -> Any:
        job = self.job
        for name in ("source", "target", "columns", "header", "tokenizer"):
            if getattr(job, name) is not None:
                raise UserError(f"pictures have their label from their folder, so there is no {name} to give")
        if job.data is None:
            raise UserError("which pictures? Give --data, a folder with a folder for each class, or an .npz file")
        self.pictures = open_images(job.data, job.dev, job.test, self.settings.seed)
        self.labels = self.pictures.labels
        return self.pictures

    def learn_tokenizers(self, corpus: Any, tick: Tick) -> None:
        """Do nothing: images have no tokens."""

    def complete_recipe(self, recipe: dict[str, Any]) -> None:
        recipe.setdefault("vocab", 1)
        head = recipe["model"].get("head", "classify")
        recipe["model"]["head"] = ({"part": head} if isinstance(head, str) else head) | {"classes": len(self.labels)}

    def check_model(self, model: Model) -> None:
        self.processor: ImageProcessor = default_processor(model.embed.sides, model.embed.channels)  # type: ignore[union-attr]

    def run_info(self) -> dict[str, Any]:
        return {"labels": self.labels, "images": self.processor.table()}

    def objective(self) -> Objective:
        return Classify(self.settings.label_smoothing)

    def batches(self, model: Model, corpus: ImageCorpus, say: Say, tick: Tick) -> Any:
        s = self.settings
        rows = s.batch_size or s.batch_tokens // model.embed.count  # type: ignore[operator]
        return ImageBatches(self._prepared(corpus.train, "train.images", say, tick), self.processor, rows, s.seed)

    def dev(self, model: Model, lines: Any) -> Any:
        rows = self._prepared(lines, "dev.images", say_nothing, no_progress)
        seen = ImageBatches(rows, self.processor, DEV_TOKENS // model.embed.count, 0, shuffle=False)  # type: ignore[operator]
        return lambda model: measure_batches(model, first_epoch(seen), next(model.parameters()).device)  # type: ignore[arg-type]

    def _prepared(self, examples: LabeledImages, name: str, say: Say, tick: Tick) -> Any:
        numbers = {label: number for number, label in enumerate(self.labels)}
        for label in examples.answers:
            if label not in numbers:
                raise UserError(f"{examples.name}: the class '{label}' is not in the training data")
        answers, skip = (numbers[label] for label in examples.answers), self.job.bad_lines == "skip"
        rows, unreadable = prepare_images(
            examples, answers, self.processor, self.data_path(name), skip, partial(tick, "preparing")
        )
        if unreadable:
            say(f"{examples.name}: {unreadable:,} pictures cannot be read and are left out")
        return rows

    def make_predictor(self, model: Model, folder: Path | None, documents: bool) -> Any:
        return ImageClassifier(model, folder, processor=self.processor, labels=self.labels)
