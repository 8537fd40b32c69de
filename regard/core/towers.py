"""Two towers: images and texts are encoded into one vector space, where matching ones lie close together.

    score(i, t) = exp(s)  image(i) . text(t)          both normalized

Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision" (CLIP), arXiv:2103.00020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import UserError
from regard.schema import check_arguments, make

from .model import Model


class Towers(nn.Module):
    """The constructor is the schema of a recipe's [model] where kind is "towers".

    image, text: tables for a Model each, with heads that give one vector per sequence, of the same size.
    end:         the token that ends a text: what follows the first one is not read, and of a text without it only the
                 first token is read. None: a text ends with its largest token id.
    scale:       the initial s.
    """

    def __init__(self, kind: str, vocab: int, image: dict, text: dict, end: int | None = None, scale: float = 2.6592):
        super().__init__()
        self.kind, self.end = kind, end
        self.image, self.text = _tower("image", image, vocab), _tower("text", text, vocab)
        dims = {side: getattr(model.head, "dim", None) for side, model in self.towers.items()}
        if len(set(dims.values())) > 1:
            raise UserError(f"both heads must give vectors of one length, not {dims['image']} and {dims['text']}")
        self.scale = nn.Parameter(torch.empty(()).fill_(scale))

    @property
    def towers(self) -> dict[str, Model]:
        return {"image": self.image, "text": self.text}

    @property
    def vocab(self) -> int:
        return self.text.vocab

    source_vocab = vocab

    @property
    def limit(self) -> int | None:
        """The longest text that the text tower's positions allow; None: any."""
        return self.text.limit

    def forward(self, images: Tensor, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """images, in the image tower's input format, and tokens (texts, time) -> scores (images, texts)."""
        return self.similarity(self.encode_images(images), self.encode_texts(tokens, valid))

    def encode_images(self, images: Tensor) -> Tensor:
        """Return normalized image vectors (images, dim)."""
        return F.normalize(self.image(images), dim=-1)

    def encode_texts(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return normalized text vectors (texts, dim)."""
        masked = tokens if valid is None else tokens.masked_fill(~valid, -1)
        ends = (masked if self.end is None else (masked == self.end).int()).argmax(1)  # (texts,) the first of several
        time = int(ends.max()) + 1
        real = torch.arange(time, device=tokens.device) <= ends[:, None]
        return F.normalize(self.text(tokens[:, :time], None if bool(real.all()) else real), dim=-1)

    def similarity(self, images: Tensor, texts: Tensor, max_scale: float | None = None) -> Tensor:
        """Compare vectors (images, dim) and (texts, dim) -> scores (images, texts). max_scale: bounds exp(s)."""
        scale = self.scale.exp()
        return (scale if max_scale is None else scale.clamp(max=max_scale)) * (images @ texts.mT)

    def random_inputs(self, batch: int, time: int) -> dict[str, Tensor]:
        """Return random inputs of the right kind, for tests."""
        return {
            "images": self.image.embed.random_input(batch, time),
            "tokens": self.text.embed.random_input(batch, time),
        }


def models_in(model: Model | Towers) -> dict[str, Model]:
    """Return the models inside a model by name: itself under the empty name, or two towers."""
    return model.towers if isinstance(model, Towers) else {"": model}


def _tower(side: str, table: dict, vocab: int) -> Model:
    try:
        check_arguments(Model, table, {"vocab": vocab}, side)
        model = make(Model, table, {"vocab": vocab}, side)
    except UserError as error:
        raise error.inside(side) from error.__cause__
    if not model.head.pools or model.encoder is not None:
        raise UserError("must be an encoder or a decoder with a head that gives one vector, such as 'vector'", (side,))
    return model
