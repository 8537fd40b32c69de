"""Pictures as numbers: read from a file, brought to the size that a model takes, shifted and scaled as it wants them.

    x = (pixels * factor - mean) / std          (channels, height, width)

preprocessor_config.json of the Hugging Face layout says the same in its own words.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from regard.core import UserError
from regard.errors import in_one_line, nearest, short, shown
from regard.files.reading import must_be
from regard.schema import check_arguments

RESAMPLE = {name.lower(): kind for name, kind in Image.Resampling.__members__.items()}  # as Pillow numbers them
MODES = {1: "L", 3: "RGB"}
DEEP = ("I;16", "I;16L", "I;16B", "I")  # 16 bits a pixel
BOMB = Image.DecompressionBombWarning
BROKEN = (  # whatever Pillow may say of a damaged file
    OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, KeyError, OverflowError, struct.error, BOMB,
    Image.DecompressionBombError,
)  # fmt: skip
LARGEST = 1 << 14  # side of a picture that a model looks at
HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Lens:
    """How a picture becomes what a model takes.

    size:      height and width, whatever shape the picture has; one number: so long becomes its shorter side; None: the
               picture stays as it is.
    crop:      height and width of what is then kept of its middle, black where there is no picture; None: all of it.
    resample:  nearest, box, bilinear, hamming, bicubic or lanczos.
    factor:    of the pixels, which are 0 to 255.
    mean, std: of each channel; None: nothing is taken away, nor divided by.
    channels:  3 for colours, 1 for grey.
    """

    size: int | list | None = None
    crop: list | None = None
    resample: str = "bilinear"
    factor: float = 1 / 255
    mean: list | None = None
    std: list | None = None
    channels: int = 3

    def __post_init__(self) -> None:
        if self.resample not in RESAMPLE:
            raise UserError(f"unknown resample '{self.resample}'{nearest(self.resample, RESAMPLE)}")
        if self.channels not in MODES:
            raise UserError(f"a picture has 3 channels or 1, not {self.channels}")
        for name in ("size", "crop"):
            sides = getattr(self, name)
            sides = sides if isinstance(sides, list) else [] if sides is None else [sides]
            if any(not isinstance(side, int) or not 1 <= side <= LARGEST for side in sides) or len(sides) > 2:
                raise UserError(
                    f"{name} is height and width in pixels, up to {LARGEST:,}, not {shown(getattr(self, name))}"
                )
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            must_be(numbers, list[float] | None)
            if numbers is not None and len(numbers) not in (1, self.channels):
                raise UserError(f"{name} has {len(numbers)} numbers for {self.channels} channels")

    @classmethod
    def read(cls, table: dict[str, Any]) -> Lens:
        """From a run.json, unknown keys refused."""
        return cls(**check_arguments(cls, table, {}, "images"))

    def table(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of what it makes of any picture; None: that depends on the picture."""
        sides = self.crop or (self.size if isinstance(self.size, list) else None)
        return None if sides is None else (self.channels, *sides)

    def look(self, files: Iterable[str | Path]) -> Tensor:
        """(pictures, channels, height, width) of picture files, which must come out equally large."""
        return self.numbers(np.stack([self.pixels(open_image(file)) for file in files]))

    def pixels(self, image: Image.Image) -> np.ndarray:
        """(channels, height, width) from 0 to 255."""
        image = image.convert(MODES[self.channels])
        if self.size is not None:
            height, width = self._sides(image)
            if height * width > LARGEST**2:
                raise UserError(f"a picture of {image.width:,} x {image.height:,} pixels is too narrow to be resized")
            image = image.resize((width, height), RESAMPLE[self.resample])
        found = np.asarray(image)
        found = found[None] if found.ndim == 2 else np.moveaxis(found, -1, 0)
        return found if self.crop is None else _middle(found, *self.crop)

    def numbers(self, pixels: np.ndarray) -> Tensor:
        """pixels (..., channels, height, width) -> the same, as the model takes them."""
        x = torch.from_numpy(np.array(pixels)).float() * self.factor
        if self.mean is not None:
            x = x - torch.tensor(self.mean)[:, None, None]
        return x if self.std is None else x / torch.tensor(self.std)[:, None, None]

    def _sides(self, image: Image.Image) -> tuple[int, int]:
        if isinstance(self.size, list):
            return self.size[0], self.size[1]
        assert self.size is not None
        width, height = image.size
        longer = int(self.size * max(width, height) / min(width, height))
        return (longer, self.size) if width <= height else (self.size, longer)


def open_image(path: str | Path) -> Image.Image:
    """A picture in any form that Pillow reads, upright as the camera says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", BOMB)
            with Image.open(path) as image:
                image.load()
                image = ImageOps.exif_transpose(image)
    except FileNotFoundError:
        raise UserError(f"there is no picture '{short(path)}'") from None
    except UnidentifiedImageError:
        raise UserError(f"{short(path)} is no picture that can be read: of no known form, or damaged") from None
    except BROKEN as error:
        raise UserError(f"{short(path)} cannot be read as a picture: {in_one_line(error)}") from None
    if image.mode in DEEP:
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return image


def _middle(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle of (channels, old height, old width), black where it is larger than all."""
    old = pixels.shape[1:]
    around = [(0, 0), *((math.ceil(more / 2), more // 2) for more in (max(height - old[0], 0), max(width - old[1], 0)))]
    pixels = np.pad(pixels, around)
    top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    return pixels[:, top : top + height, left : left + width]


def usual(sides: Iterable[int], channels: int = 3, clip: bool = False) -> Lens:
    """What is done where nothing is said, for a model of images this large: as with ViT, or as with CLIP."""
    sides = list(sides)
    if channels != 3:
        return Lens(sides, mean=[0.5], std=[0.5], channels=channels)
    if clip:
        return Lens(min(sides), sides, "bicubic", mean=list(CLIP_MEAN), std=list(CLIP_STD))
    return Lens(sides, mean=list(HALF), std=list(HALF))


class Preprocessor(TypedDict, total=False):
    """The entries of preprocessor_config.json that are read."""

    image_processor_type: str | None
    feature_extractor_type: str | None
    do_resize: bool
    do_center_crop: bool
    do_rescale: bool
    do_normalize: bool
    image_mean: list[float] | None
    image_std: list[float] | None
    rescale_factor: float
    resample: int


def from_preprocessor(told: dict[str, Any], channels: int = 3) -> Lens:
    """What preprocessor_config.json says. What it leaves out is as its class has it: ViT's, or CLIP's."""
    kind = str(told.get("image_processor_type") or told.get("feature_extractor_type") or "")
    clip = "CLIP" in kind
    size = crop = mean = std = None
    if told.get("do_resize", True):
        size = _size(told.get("size", 224), "size", clip)
    if told.get("do_center_crop", clip):
        crop = _size(told.get("crop_size", 224), "crop_size", False)
    if told.get("do_normalize", True):
        mean = list(told.get("image_mean") or (CLIP_MEAN if clip else HALF))
        std = list(told.get("image_std") or (CLIP_STD if clip else HALF))
    factor = told.get("rescale_factor", 1 / 255) if told.get("do_rescale", True) else 1.0
    number = told.get("resample", 3 if clip else 2)
    names = [name for name, kind in RESAMPLE.items() if int(kind) == number]
    if not names:
        raise UserError(f"preprocessor_config.json says resample = {number!r}, which Pillow does not know")
    return Lens(size, crop if crop is None or isinstance(crop, list) else [crop] * 2, names[0], factor, mean, std,
                channels)  # fmt: skip


def to_preprocessor(lens: Lens, kind: str) -> dict[str, Any]:
    """The same the other way; kind: their class."""
    told: dict[str, Any] = {"image_processor_type": kind, "do_resize": lens.size is not None}
    if lens.size is not None:
        told["size"] = _sides_table(lens.size) if isinstance(lens.size, list) else {"shortest_edge": lens.size}
    told["do_center_crop"] = lens.crop is not None
    if lens.crop is not None:
        told["crop_size"] = _sides_table(lens.crop)
    told |= {"do_rescale": True, "rescale_factor": lens.factor, "resample": int(RESAMPLE[lens.resample])}
    told["do_normalize"] = lens.mean is not None and lens.std is not None
    return told | ({"image_mean": lens.mean, "image_std": lens.std} if told["do_normalize"] else {})


def _sides_table(sides: list) -> dict[str, int]:
    return {"height": sides[0], "width": sides[1]}


def _size(told: Any, name: str, shorter: bool) -> int | list:
    """A number for the shorter side, or height and width. shorter: what a number alone means."""
    if isinstance(told, int):
        return told if shorter else [told, told]
    if isinstance(told, list | tuple) and len(told) == 2:
        return list(told)
    known = {key: value for key, value in told.items() if value is not None} if isinstance(told, dict) else {}
    if set(known) == {"height", "width"}:
        return [known["height"], known["width"]]
    if set(known) == {"shortest_edge"}:
        return known["shortest_edge"]
    raise UserError(f"preprocessor_config.json says {name} = {told!r}: height and width, or shortest_edge, are read")
