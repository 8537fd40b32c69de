"""Read a folder in the Hugging Face layout: config.json, and tensors in one or several files, one at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.core import UserError
from regard.errors import in_one_line, short
from regard.files.paths import check_model_folder, named_path
from regard.files.reading import Positive, Range, read_json

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "pytorch_model.pt", "model.pth")


class Rope(TypedDict, total=False):
    """The table rope_scaling or rope_parameters."""

    rope_type: str | None
    type: str | None
    rope_theta: Annotated[float, Range(0)] | None
    factor: Annotated[float, Range(0)] | None
    low_freq_factor: float | None
    high_freq_factor: float | None
    beta_fast: float | None
    beta_slow: float | None
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool | None
    partial_rotary_factor: float | None
    original_max_position_embeddings: Positive | None


class Config(TypedDict, total=False):
    """The entries of config.json and generation_config.json that a family does not list among its defaults."""

    model_type: str | None
    architectures: list[str] | None
    id2label: dict[str, Any] | None
    num_labels: Annotated[int, Range(1, 1 << 24)]
    add_pooling_layer: bool
    scale_decoder_outputs: bool
    tie_word_embeddings: bool
    share_encoder_decoder_embeddings: bool
    classifier_dropout: float | None
    text_config: dict[str, Any] | None
    vision_config: dict[str, Any] | None
    attn_config: dict[str, Any] | None
    rope_theta: Annotated[float, Range(0)] | None
    rope_scaling: Rope | None
    rope_parameters: Rope | None
    partial_rotary_factor: float | None
    original_max_position_embeddings: Positive | None
    max_position_embeddings: Positive
    bad_words_ids: list[Any] | None


class Index(TypedDict):
    """The index of weights in several files: which tensor is in which."""

    weight_map: dict[str, str]


class TensorInfo(NamedTuple):
    """The shape and type of a tensor, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Tensors:
    """The tensors of safetensors files by name, each read when it is asked for.

    info: shape and type of each.
    """

    def __init__(self, *files: Path):
        self.info: dict[str, TensorInfo] = {}
        self._loaded: dict[str, Tensor] = {}
        self._files: dict[str, Any] = {}
        self._where: dict[str, Path] = {}
        for path in files:
            self._open(path)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._loaded:
            return self._loaded[name]
        path = self._where[name]
        try:
            return self._files[str(path)].get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{short(path)} is damaged: {in_one_line(error)}") from None

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(str(path), "pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{short(path)} is damaged: {in_one_line(error)}") from None
        self._files[str(path)] = file
        self._where |= dict.fromkeys(file.keys(), path)
        self.info |= {name: self._info_of(name) for name in file.keys()}  # noqa: SIM118

    def _info_of(self, name: str) -> TensorInfo:
        part = self._files[str(self._where[name])].get_slice(name)
        if part.get_dtype() not in TYPES:
            raise UserError(f"{short(self._where[name])}: {name} is of the type {part.get_dtype()}, which is not read")
        return TensorInfo(tuple(part.get_shape()), TYPES[part.get_dtype()])


class Folder(Tensors):
    """A folder in the Hugging Face layout.

    pickle: allow files written by torch.save, read with weights_only=True, so that no code in them runs.
    """

    def __init__(self, path: str | Path, pickle: bool = False):
        super().__init__()
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"there is no folder '{short(self.path)}'")
        if os.path.lexists(self.path / "config.json"):
            check_model_folder(self.path)
        self.config = read_json(self.path / "config.json", Config)
        if (self.path / WEIGHTS_FILE).is_file():
            self._open(self.path / WEIGHTS_FILE)
        elif (self.path / INDEX_FILE).is_file():
            self._shards(self.path / INDEX_FILE)
        else:
            self._unpickle(pickle)

    def table(self, name: str, schema: Any = dict) -> dict[str, Any]:
        """Return the contents of a JSON file in the folder; empty when there is none."""
        return read_json(self.path / name, schema) if (self.path / name).is_file() else {}

    def _shards(self, index: Path) -> None:
        places = self._places(index)
        for path in self._listed(index, places):
            self._open(path)
        for name, file in places.items():
            if self._where.get(name) != self.path / file:
                raise UserError(f"{short(index)} says that {name} is in {file}, and it is not")

    def _places(self, index: Path) -> dict[str, str]:
        """Return the file of each tensor, as the index lists them."""
        places = read_json(index, Index)["weight_map"]
        if not places:
            raise UserError(f"{short(index)} lists no tensors (weight_map)")
        return places

    def _listed(self, index: Path, places: dict[str, str]) -> list[Path]:
        """Return the paths of the files that an index names. Refuse files outside this folder."""
        paths = []
        for name in sorted(set(places.values())):
            path = named_path(self.path, name)
            if path is None or path.parent != self.path or not path.is_file():
                raise UserError(f"{short(index)} names the file '{name}', which is not there")
            paths.append(path)
        return paths

    def _unpickle(self, allowed: bool) -> None:
        found = next((self.path / name for name in PICKLES if (self.path / name).is_file()), None)
        if found is None:
            raise UserError(f"{short(self.path)} holds no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}")
        if not allowed:
            raise UserError(
                f"{short(found)} is a pickle, which may run code when it is read: ask its maker for safetensors, or "
                "say --pickle, which reads nothing but tensors (torch.load with weights_only=True)"
            )
        files = [found]
        if found.suffix == ".json":
            files = self._listed(found, self._places(found))
        for path in files:
            try:
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # an unpickler raises many kinds
                raise UserError(f"{short(path)} cannot be read safely: {in_one_line(error)}") from None
            tensors = tensors.get("state_dict", tensors) if isinstance(tensors, dict) else tensors
            if not isinstance(tensors, dict) or not all(_is_plain(name, one) for name, one in tensors.items()):
                raise UserError(f"{short(path)} is no table of plain tensors by name")
            self._loaded |= tensors
            self.info |= {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def _is_plain(name: Any, tensor: Any) -> bool:
    """Return whether this is a name and a dense tensor of a type that can be written to safetensors."""
    dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_quantized
    return isinstance(name, str) and dense and not tensor.is_meta and tensor.dtype in TYPES.values()


TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
