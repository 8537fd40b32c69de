"""Turn images into tensors: read a file, resize and crop it to the size that a model takes, and normalize it.

    x = (pixels * factor - mean) / std          (channels, height, width)

preprocessor_config.json of the Hugging Face layout describes the same steps.
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
from regard.files.reading import check_type
from regard.schema import check_arguments

RESAMPLE = {name.lower(): kind for name, kind in Image.Resampling.__members__.items()}  # as Pillow numbers them
MODES = {1: "L", 3: "RGB"}
SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I")  # 16 bits a pixel
BOMB_WARNING = Image.DecompressionBombWarning
BROKEN = (  # all that Pillow may raise on a damaged file
    OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, KeyError, OverflowError, struct.error,
    BOMB_WARNING, Image.DecompressionBombError,
)  # fmt: skip
MAX_SIDE = 1 << 14  # pixels of a side after resizing or cropping
HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ImageProcessor:
    """How an image becomes the input of a model.

    size:      height and width to resize to, ignoring the aspect ratio; one number: the length of the shorter side,
               keeping the ratio; None: the image is not resized.
    crop:      height and width of the center crop, padded with black where the image is smaller; None: no crop.
    resample:  nearest, box, bilinear, hamming, bicubic or lanczos.
    factor:    what pixels, 0 to 255, are multiplied by.
    mean, std: of each channel; None: not subtracted, not divided by.
    channels:  3 for RGB, 1 for grayscale.
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
            if any(not isinstance(side, int) or not 1 <= side <= MAX_SIDE for side in sides) or len(sides) > 2:
                raise UserError(
                    f"{name} is height and width in pixels, up to {MAX_SIDE:,}, not {shown(getattr(self, name))}"
                )
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            check_type(numbers, list[float] | None)
            if numbers is not None and len(numbers) not in (1, self.channels):
                raise UserError(f"{name} has {len(numbers)} numbers for {self.channels} channels")

    @classmethod
    def read(cls, table: dict[str, Any]) -> ImageProcessor:
        """Return the processor that run.json describes; unknown keys are refused."""
        return cls(**check_arguments(cls, table, {}, "images"))

    def table(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Return the shape of its output, (channels, height, width); None: it depends on the image."""
        sides = self.crop or (self.size if isinstance(self.size, list) else None)
        return None if sides is None else (self.channels, *sides)

    def load(self, files: Iterable[str | Path]) -> Tensor:
        """Return image files as a tensor, (images, channels, height, width). They must come out equally large."""
        return self.normalize(np.stack([self.resize_and_crop(open_image(file)) for file in files]))

    def resize_and_crop(self, image: Image.Image) -> np.ndarray:
        """Return the pixels after resizing and cropping, (channels, height, width), 0 to 255."""
        image = image.convert(MODES[self.channels])
        if self.size is not None:
            height, width = self._sides(image)
            if height * width > MAX_SIDE**2:
                raise UserError(f"a picture of {image.width:,} x {image.height:,} pixels is too narrow to be resized")
            image = image.resize((width, height), RESAMPLE[self.resample])
        found = np.asarray(image)
        found = found[None] if found.ndim == 2 else np.moveaxis(found, -1, 0)
        return found if self.crop is None else _center_crop(found, *self.crop)

    def normalize(self, pixels: np.ndarray) -> Tensor:
        """Return pixels (..., channels, height, width) scaled and normalized for the model, in the same shape."""
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
    """Open an image in any format that Pillow reads, rotated as its EXIF data says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", BOMB_WARNING)
            with Image.open(path) as image:
                image.load()
                image = ImageOps.exif_transpose(image)
    except FileNotFoundError:
        raise UserError(f"there is no picture '{short(path)}'") from None
    except UnidentifiedImageError:
        raise UserError(f"{short(path)} is no picture that can be read: of no known form, or damaged") from None
    except BROKEN as error:
        raise UserError(f"{short(path)} cannot be read as a picture: {in_one_line(error)}") from None
    if image.mode in SIXTEEN_BIT:
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return image


def _center_crop(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the center of (channels, old height, old width), padded with black where the crop is larger."""
    old = pixels.shape[1:]
    around = [(0, 0), *((math.ceil(more / 2), more // 2) for more in (max(height - old[0], 0), max(width - old[1], 0)))]
    pixels = np.pad(pixels, around)
    top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    return pixels[:, top : top + height, left : left + width]


def default_processor(sides: Iterable[int], channels: int = 3, clip: bool = False) -> ImageProcessor:
    """Return the default processor for images of this height and width: ViT's, or CLIP's."""
    sides = list(sides)
    if channels != 3:
        return ImageProcessor(sides, mean=[0.5], std=[0.5], channels=channels)
    if clip:
        return ImageProcessor(min(sides), sides, "bicubic", mean=list(CLIP_MEAN), std=list(CLIP_STD))
    return ImageProcessor(sides, mean=list(HALF), std=list(HALF))


class PreprocessorConfig(TypedDict, total=False):
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


def from_preprocessor_config(config: dict[str, Any], channels: int = 3) -> ImageProcessor:
    """Return the processor that preprocessor_config.json describes, with the defaults of its class: ViT's, or
    CLIP's."""
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    clip = "CLIP" in kind
    size = crop = mean = std = None
    if config.get("do_resize", True):
        size = _size(config.get("size", 224), "size", clip)
    if config.get("do_center_crop", clip):
        crop = _size(config.get("crop_size", 224), "crop_size", False)
    if config.get("do_normalize", True):
        mean = list(config.get("image_mean") or (CLIP_MEAN if clip else HALF))
        std = list(config.get("image_std") or (CLIP_STD if clip else HALF))
    factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
    number = config.get("resample", 3 if clip else 2)
    names = [name for name, kind in RESAMPLE.items() if int(kind) == number]
    if not names:
        raise UserError(f"preprocessor_config.json says resample = {number!r}, which Pillow does not know")
    crop = crop if crop is None or isinstance(crop, list) else [crop] * 2
    return ImageProcessor(size, crop, names[0], factor, mean, std, channels)


def to_preprocessor_config(processor: ImageProcessor, kind: str) -> dict[str, Any]:
    """Return a processor as the entries of preprocessor_config.json. kind: the Hugging Face class."""
    config: dict[str, Any] = {"image_processor_type": kind, "do_resize": processor.size is not None}
    if processor.size is not None:
        config["size"] = (
            _sides_table(processor.size) if isinstance(processor.size, list) else {"shortest_edge": processor.size}
        )
    config["do_center_crop"] = processor.crop is not None
    if processor.crop is not None:
        config["crop_size"] = _sides_table(processor.crop)
    config |= {"do_rescale": True, "rescale_factor": processor.factor, "resample": int(RESAMPLE[processor.resample])}
    config["do_normalize"] = processor.mean is not None and processor.std is not None
    return config | ({"image_mean": processor.mean, "image_std": processor.std} if config["do_normalize"] else {})


def _sides_table(sides: list) -> dict[str, int]:
    return {"height": sides[0], "width": sides[1]}


def _size(config: Any, name: str, shorter: bool) -> int | list:
    """Return the length of the shorter side, or height and width. shorter: whether a single number is the former."""
    if isinstance(config, int):
        return config if shorter else [config, config]
    if isinstance(config, list | tuple) and len(config) == 2:
        return list(config)
    known = {key: value for key, value in config.items() if value is not None} if isinstance(config, dict) else {}
    if set(known) == {"height", "width"}:
        return [known["height"], known["width"]]
    if set(known) == {"shortest_edge"}:
        return known["shortest_edge"]
    raise UserError(f"preprocessor_config.json says {name} = {config!r}: height and width, or shortest_edge, are read")
