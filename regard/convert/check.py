"""Compare a converted model with `transformers` on the same random input."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core import Context, Model, UserError, restore
from regard.errors import in_one_line
from regard.files.reading import read_json

from .family import Config, every_family

TOLERANCE = 1e-4  # times the largest output


class Outcome(NamedTuple):
    what: str  # what was compared
    worst: float  # the largest difference
    size: float  # the largest output of transformers
    holds: bool


@torch.no_grad()
def check(run: Path, folder: Path) -> Outcome:
    """Compare a run folder with the same model in a folder in the Hugging Face layout."""
    try:
        import transformers
    except ImportError:
        raise UserError("--check compares with transformers: pip install transformers") from None
    config = read_json(folder / "config.json")
    family = every_family()[config["model_type"]]
    said = (config.get("architectures") or [family.architectures[0]])[0]
    name = said if hasattr(transformers, said) else family.architectures[0]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        theirs = getattr(transformers, name).from_pretrained(str(folder), dtype=torch.float32).eval()
    except Exception as error:  # transformers raises many kinds
        raise UserError(f"transformers cannot load {folder} as {name}: {in_one_line(error)}") from None
    ours = restore(run).float().eval()
    given, asked = _inputs(ours, family.complete(config))
    want = theirs(**given)
    name = next(key for key in ("logits", "prediction_logits", "logits_per_image", "last_hidden_state") if key in want)
    found = _hidden(ours, asked) if name == "last_hidden_state" else ours(**asked)
    return _compare(found, want[name], asked.get("valid"))


def _hidden(model: Model, asked: dict[str, Any]) -> Tensor:
    """Return the hidden vectors before the head, for models without one."""
    tokens, memory = asked["tokens"], None
    if "source" in asked:
        memory = model.encode(asked["source"], asked.get("source_valid"))
    extent = model.embed.extent(tokens)
    return model.hidden(tokens, Context.begin(*extent, tokens.device, valid=asked.get("valid"), memory=memory))


def _compare(found: Tensor, want: Tensor, valid: Tensor | None) -> Outcome:
    if found.shape != want.shape:
        raise UserError(f"the output is {tuple(found.shape)} here and {tuple(want.shape)} in transformers")
    if valid is not None and found.dim() == 3:
        found, want = found[valid], want[valid]
    worst, size = float((found - want).abs().max()), float(want.abs().max())
    return Outcome("scores" if found.dim() > 1 else "answers", worst, size, worst <= TOLERANCE * max(size, 1.0))


def _inputs(model: Model, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return random inputs, as transformers takes them and as regard does, one row shorter where padding is
    possible."""
    generator = torch.Generator().manual_seed(0)

    def tokens(vocab: int, time: int) -> Tensor:
        return torch.randint(3, vocab, (2, time), generator=generator)

    def valid(time: int) -> Tensor:
        return torch.arange(time)[None] < torch.tensor([[time], [time - 3]])

    if model.kind == "towers":
        ids = tokens(model.vocab - 1, 12)
        embed = model.image.embed
        images = torch.randn(2, embed.channels, *embed.sides, generator=generator)
        ids[:, -1] = model.vocab - 1 if model.end is None else model.end
        return {"pixel_values": images, "input_ids": ids}, {"images": images, "tokens": ids}
    if model.kind == "decoder":
        ids = tokens(model.vocab, 12)
        return {"input_ids": ids}, {"tokens": ids}
    if model.kind == "encoder-decoder":
        assert model.source_embed is not None
        said, read = tokens(model.vocab, 7), valid(12)
        source = model.source_embed.random_input(2, 12)
        if source.is_floating_point():
            frames = torch.randn(2, config["num_mel_bins"], 2 * config["max_source_positions"], generator=generator)
            return {"input_features": frames, "decoder_input_ids": said}, {"tokens": said, "source": frames.mT}
        source = tokens(model.source_vocab, 12)
        return (
            {"input_ids": source, "attention_mask": read.long(), "decoder_input_ids": said},
            {"tokens": said, "source": source, "source_valid": read},
        )
    if "image_size" in config:
        images = torch.randn(2, model.embed.channels, *model.embed.sides, generator=generator)  # type: ignore[misc]
        return {"pixel_values": images}, {"tokens": images}
    ids, read = tokens(model.vocab, 12), valid(12)
    return {"input_ids": ids, "attention_mask": read.long()}, {"tokens": ids, "valid": read}
