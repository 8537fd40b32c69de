"""Image processing against the processors of `transformers`, and files that are not images."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from regard.core import UserError
from regard.data.images import (
    ImageProcessor,
    default_processor,
    from_preprocessor_config,
    open_image,
    to_preprocessor_config,
)


@pytest.fixture
def picture(tmp_path):
    """Return an image that is wider than high and not uniform."""
    rng = np.random.default_rng(1)
    waves = np.sin(np.arange(37)[:, None, None] / 5 + np.arange(53)[None, :, None] / 7 + np.arange(3))
    pixels = (127 + 90 * waves + rng.integers(-30, 30, (37, 53, 3))).clip(0, 255).astype(np.uint8)
    path = tmp_path / "waves.png"
    Image.fromarray(pixels).save(path)
    return path


PROCESSORS = {
    "vit": (ViTImageProcessorPil, {}),
    "vit, small": (ViTImageProcessorPil, {"size": {"height": 19, "width": 23}}),
    "vit, a number": (ViTImageProcessorPil, {"size": 20, "resample": 3, "image_mean": [0.1, 0.2, 0.3]}),
    "vit, not normalised": (ViTImageProcessorPil, {"do_normalize": False, "rescale_factor": 0.01, "resample": 0}),
    "vit, as it is": (ViTImageProcessorPil, {"do_resize": False, "do_rescale": False, "image_std": [2.0, 3.0, 4.0]}),
    "clip": (CLIPImageProcessorPil, {}),
    "clip, a number": (CLIPImageProcessorPil, {"size": 31, "crop_size": 24}),
    "clip, oblong": (CLIPImageProcessorPil, {"size": {"shortest_edge": 29}, "crop_size": {"height": 27, "width": 20}}),
    "clip, too small": (CLIPImageProcessorPil, {"size": 21, "crop_size": {"height": 26, "width": 45}, "resample": 1}),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("upright", [False, True])
def test_numbers_are_theirs(name, upright, picture):
    kind, given = PROCESSORS[name]
    if upright:
        Image.open(picture).rotate(90, expand=True).save(picture)
    processor = kind(**given)
    want = processor(Image.open(picture), return_tensors="pt").pixel_values
    told = json.loads(processor.to_json_string())
    lens = from_preprocessor_config(told)
    ours = lens.load([picture])
    assert ours.shape == want.shape
    assert torch.allclose(ours, want.float(), atol=1e-5, rtol=1e-5)
    assert lens.shape is None or lens.shape == tuple(ours.shape[1:])
    assert ImageProcessor.read(json.loads(json.dumps(lens.table()))) == lens
    again = kind(**to_preprocessor_config(lens, told["image_processor_type"]))
    assert torch.equal(again(Image.open(picture), return_tensors="pt").pixel_values, want)


def test_old_configs():
    """The configs of the first CLIP and ViT have numbers instead of tables, and few entries."""
    clip = from_preprocessor_config(
        {"crop_size": 224, "do_center_crop": True, "do_normalize": True, "do_resize": True, "size": 224,
         "feature_extractor_type": "CLIPFeatureExtractor", "image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.2, 0.1],
         "resample": 3}
    )  # fmt: skip
    assert (clip.size, clip.crop, clip.resample, clip.mean) == (224, [224, 224], "bicubic", [0.4, 0.5, 0.6])
    vit = from_preprocessor_config({"do_normalize": True, "do_resize": True, "size": 384})
    assert (vit.size, vit.crop, vit.resample, vit.mean) == ([384, 384], None, "bilinear", [0.5, 0.5, 0.5])
    assert default_processor([384, 384]) == vit
    assert default_processor([224, 224], clip=True).crop == [224, 224]


def test_forms(tmp_path, picture):
    """Images may be grayscale, transparent, 16-bit, or rotated by EXIF data."""
    lens = ImageProcessor([5, 7], factor=1.0)
    image = Image.open(picture)
    grey = image.convert("L")
    for mode in ("LA", "RGBA", "P", "CMYK"):
        image.convert(mode).save(tmp_path / f"{mode}.tiff")
        assert lens.load([tmp_path / f"{mode}.tiff"]).shape == (1, 3, 5, 7)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 256)
    deep.save(tmp_path / "deep.png")
    grey.save(tmp_path / "grey.png")
    one = ImageProcessor([5, 7], channels=1)
    assert torch.equal(one.load([tmp_path / "deep.png"]), one.load([tmp_path / "grey.png"]))
    turned = image.rotate(90, expand=True)
    exif = turned.getexif()
    exif[0x0112] = 6  # turn it to the right to see it
    turned.save(tmp_path / "turned.png", exif=exif)
    assert torch.equal(lens.load([tmp_path / "turned.png"]), lens.load([picture]))


def test_no_picture(tmp_path, picture):
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.jpg").write_bytes(b"")
    whole = picture.read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    for name, message in (
        ("text.png", "text.png is no picture"),
        ("empty.jpg", "empty.jpg is no picture"),
        ("cut.png", "cut.png cannot be read as a picture"),
        ("none.png", "there is no picture '.*none.png'"),
        (".", "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            open_image(tmp_path / name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resample": "cubic"}, "did you mean 'bicubic'"),
        ({"channels": 2}, "3 channels or 1"),
        ({"size": 0}, "size is height and width"),
        ({"size": [3, 4, 5]}, "size is height and width"),
        ({"mean": [0.1, 0.2]}, "mean has 2 numbers for 3 channels"),
        ({"sise": 3}, "did you mean 'size'"),
    ],
)
def test_bad_lenses(given, message):
    with pytest.raises(UserError, match=message):
        ImageProcessor.read(given)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"size": {"longest_edge": 4}}, "size = {'longest_edge': 4}"),
        ({"do_center_crop": True, "crop_size": {"width": 4}}, "crop_size"),
        ({"resample": 17}, "resample = 17"),
    ],
)
def test_bad_preprocessors(told, message):
    with pytest.raises(UserError, match=message):
        from_preprocessor_config(told)
