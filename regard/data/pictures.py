"""Images with a label or a text each, from folders, arrays or a table: prepared once and read in batches.

shapes/circle/a.png  shapes/square/b.jpg         a folder for each class, below train, dev and test where there are any
digits.npz           images (images, height, width[, channels]), labels (images,), optionally names (classes,)
seen.tsv             a file, a tab and what it shows, one image per line
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from regard.core import UserError
from regard.errors import in_one_line, short

from .arrays import read_arrays
from .batches import Batch
from .folder import SPLIT_NAMES, similar_name_hint
from .images import ImageProcessor, open_image
from .split import by_hash, hash_bin

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
PARTS = ("train", "dev", "test")

Tick = Callable[[int], None]


@dataclass(frozen=True)
class LabeledImages:
    """Images and the label or text of each.

    files:   their paths, or their pixels, (height, width) or (height, width, channels) each.
    answers: their labels or texts.
    keys:    the strings whose hashes assign them to train, dev or test.
    """

    name: str
    files: Sequence[Path] | np.ndarray
    answers: Sequence[str]
    keys: Sequence[str]
    documents = False  # it is not text

    def __len__(self) -> int:
        return len(self.answers)

    def image(self, number: int) -> Image.Image:
        one = self.files[number]
        if isinstance(one, Path):
            return open_image(one)
        return Image.fromarray(one[..., 0] if one.ndim == 3 and one.shape[-1] == 1 else one)

    def subset(self, numbers: Sequence[int], part: str) -> LabeledImages:
        files = self.files[list(numbers)] if isinstance(self.files, np.ndarray) else [self.files[n] for n in numbers]
        return LabeledImages(
            f"{self.name}, {part}", files, [self.answers[n] for n in numbers], [self.keys[n] for n in numbers]
        )


@dataclass(frozen=True)
class ImageCorpus:
    """The splits of the data, and notes for the user."""

    train: LabeledImages
    dev: LabeledImages | None = None
    test: LabeledImages | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def labels(self) -> list[str]:
        """Return the classes of the training split, sorted, as numbers if all of them are."""
        found = set(self.train.answers)
        return sorted(found, key=int) if all(label.isdecimal() for label in found) else sorted(found)


def open_images(
    data: str | Path,
    dev: str | Path | float | None = None,
    test: str | Path | float | None = None,
    seed: int = 1,
    texts: bool = False,
) -> ImageCorpus:
    """Open images with labels or texts.

    data:      a folder or an .npz file of images with labels; with `texts`, a .tsv file, or a folder of them.
    dev, test: the same again; or how much of data to take for them: a share below 1, a number of images, 0 for none.
    """
    path, notes = Path(data), []
    parts = _read(path, texts, notes)
    if "train" not in parts:
        raise UserError(f"{short(path)} holds pictures for {' and '.join(parts)}, and none to train on")
    sizes: dict[str, float | None] = {}
    for name, given in (("dev", dev), ("test", test)):
        if given is not None and not _is_number(given):
            parts[name] = replace(_alone(Path(given), texts, notes), name=short(given))
        elif given is not None:
            parts.pop(name, None)
            sizes[name] = float(given)
    if len(parts) > 1:
        sizes.setdefault("test", 0.0)  # with a dev set given, nothing of train is taken for test
    sizes = {name: 0.0 if name in parts else sizes.get(name) for name in ("dev", "test")}
    everything = parts["train"]
    places = [hash_bin(key, seed) for key in everything.keys]
    for name, part in by_hash(everything.keys, sizes, seed).items():
        begin, end = part.share.begin, part.share.end
        parts[name] = everything.subset([n for n, at in enumerate(places) if begin <= at < end], name)
    counts = ", ".join(f"{len(parts[name]):,} for {name}" for name in PARTS if name in parts)
    made = ImageCorpus(parts["train"], parts.get("dev"), parts.get("test"), notes)
    classes = "" if texts else f" of {len(made.labels)} classes"
    notes.insert(0, f"{short(path)}: pictures{classes}, {counts}")
    return made


def open_split(data: str | Path, part: str, texts: bool = False) -> LabeledImages | None:
    """Return one split of some images, train, dev or test; all of them where they have no splits."""
    parts = _read(Path(data), texts, [])
    return next(iter(parts.values())) if len(parts) == 1 else parts.get(part)


def _is_number(given: str | Path | float) -> bool:
    try:
        return not Path(str(given)).exists() and float(str(given)) >= 0
    except ValueError:
        return False


def _alone(path: Path, texts: bool, notes: list[str]) -> LabeledImages:
    """Return all images as one split."""
    parts = _read(path, texts, notes)
    if len(parts) != 1:
        raise UserError(f"{short(path)} has parts of its own ({', '.join(parts)}): name one of them")
    return next(iter(parts.values()))


def _read(path: Path, texts: bool, notes: list[str]) -> dict[str, LabeledImages]:
    if not path.exists():
        raise UserError(f"there is no '{short(path)}' to take pictures from{similar_name_hint(path)}")
    if texts:
        return _tables(path)
    if path.suffix == ".npz":
        return _arrays(path)
    if not path.is_dir():
        raise UserError(f"{short(path)} is neither a folder of pictures nor an .npz file")
    inside = {part: next((path / word for word in words if (path / word).is_dir()), None)
              for part, words in SPLIT_NAMES.items()}  # fmt: skip
    if inside["train"] is None:
        return {"train": _folder(path, notes)}
    return {part: _folder(folder, notes) for part, folder in inside.items() if folder is not None}


def _folder(folder: Path, notes: list[str]) -> LabeledImages:
    """Return the images of a folder that holds one folder per class."""
    files, answers, others = [], [], 0
    for within in sorted(one for one in folder.iterdir() if one.is_dir()):
        for path in sorted(one for one in within.rglob("*") if one.is_file()):
            if path.suffix.lower() in SUFFIXES:
                files.append(path)
                answers.append(within.name)
            else:
                others += 1
    if len(set(answers)) < 2:
        raise UserError(
            f"{short(folder)} holds {'one class' if answers else 'no class'} of pictures: a folder for each class is "
            f"wanted, with {', '.join(sorted(SUFFIXES))} files"
        )
    if others:
        notes.append(f"{short(folder)}: {others:,} files are no pictures by their names, and are left out")
    return LabeledImages(short(folder), files, answers, [str(path.relative_to(folder)) for path in files])


def _arrays(path: Path) -> dict[str, LabeledImages]:
    arrays = read_arrays(path)
    parts = {}
    for part in PARTS:
        before = f"{part}_" if f"{part}_images" in arrays or part != "train" else ""
        if f"{before}images" in arrays:
            parts[part] = _array(path, arrays, before)
    if not parts:
        raise UserError(f"{short(path)} holds no 'images', only {', '.join(sorted(arrays)) or 'nothing'}")
    return parts


def _array(path: Path, arrays: dict[str, np.ndarray], before: str) -> LabeledImages:
    images, labels = arrays[f"{before}images"], arrays.get(f"{before}labels")
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[-1] not in (1, 3)):
        raise UserError(
            f"{short(path)}: {before}images is {images.dtype} {images.shape}, and should be bytes (pictures, height, "
            "width) or (pictures, height, width, channels)"
        )
    if labels is None or labels.shape != images.shape[:1]:
        found = "nothing" if labels is None else f"of shape {labels.shape}"
        raise UserError(f"{short(path)}: there are {len(images):,} images, and {before}labels is {found}")
    names = arrays.get("names")
    if names is None:
        answers = [str(label) for label in labels.tolist()]
    elif np.issubdtype(labels.dtype, np.integer) and labels.min() >= 0 and labels.max() < len(names):
        answers = [str(names[label]) for label in labels]
    else:
        raise UserError(f"{short(path)}: {before}labels should be numbers from 0 to {len(names) - 1}, as many as names")
    return LabeledImages(f"{short(path)}", images, answers, [str(number) for number in range(len(images))])


def _tables(path: Path) -> dict[str, LabeledImages]:
    if not path.is_dir():
        return {"train": _table(path)}
    named = {part: next((path / f"{word}.tsv" for word in words if (path / f"{word}.tsv").is_file()), None)
             for part, words in SPLIT_NAMES.items()}  # fmt: skip
    found = {part: _table(file) for part, file in named.items() if file is not None}
    if not found:
        raise UserError(f"{short(path)} holds no train.tsv, which would name pictures and say what each shows")
    return found


def _table(path: Path) -> LabeledImages:
    files, answers = [], []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{short(path)} cannot be read: {in_one_line(error)}") from None
    for number, line in enumerate(lines, 1):
        file, tab, text = line.partition("\t")
        if not tab or not file.strip() or not text.strip():
            raise UserError(f"{short(path)}, line {number}: a file, a tab and what it shows are wanted")
        files.append(path.parent / file.strip())
        answers.append(text.strip())
    if not files:
        raise UserError(f"{short(path)} names no picture")
    return LabeledImages(short(path), files, answers, [str(file) for file in files])


def prepare_images(
    examples: LabeledImages,
    answers: Iterable[int],
    processor: ImageProcessor,
    path: Path,
    skip: bool = False,
    tick: Tick = lambda done: None,
) -> tuple[np.ndarray, int]:
    """Write the pixels of every image and its integer answer to a file. Return them as a memory-mapped array, and the
    number of images that could not be read. skip: leave those out instead of refusing."""
    assert processor.shape is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    part, kind = path.with_name(path.name + ".part"), np.dtype([("answer", "<i8"), ("pixels", "u1", processor.shape)])
    rows = np.lib.format.open_memmap(part, "w+", kind, (len(examples),))
    kept = 0
    for number, answer in enumerate(answers):
        try:
            rows[kept] = (answer, processor.resize_and_crop(examples.image(number)))
            kept += 1
        except UserError:
            if not skip:
                part.unlink()
                raise
        tick(1)
    if not kept:
        part.unlink()
        raise UserError(f"{examples.name}: none of the pictures can be read")
    rows.flush()
    if kept < len(examples):
        with open(part, "r+b") as file:  # given a name, np.save would add a suffix
            readable = np.array(rows[:kept])
            file.truncate(0)
            np.save(file, readable)
    part.replace(path)
    return np.load(path, mmap_mode="r"), len(examples) - kept


class ImageBatches:
    """Batches of `count` images with an integer target each, in a new order in every epoch."""

    def __init__(self, rows: np.ndarray, processor: ImageProcessor, count: int, seed: int, shuffle: bool = True):
        self.rows, self.processor, self.count, self.seed, self.shuffle = rows, processor, max(count, 1), seed, shuffle

    def epoch(self, number: int) -> list[np.ndarray]:
        order = np.arange(len(self.rows))
        if self.shuffle:
            np.random.default_rng((self.seed, number)).shuffle(order)
        return [order[begin : begin + self.count] for begin in range(0, len(order), self.count)]

    def make(self, numbers: np.ndarray) -> Batch:
        some = self.rows[numbers]
        targets = torch.from_numpy(np.array(some["answer"]))
        return Batch(self.processor.normalize(some["pixels"]), targets, count=len(numbers))
