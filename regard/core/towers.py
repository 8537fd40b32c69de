"""Two towers: images and texts become vectors of one space, where those that belong together lie near each other.

    score(i, t) = exp(s)  image(i) . text(t)          both of length one

Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision" (CLIP), arXiv:2103.00020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import UserError
from regard.schema import fit, make

from .model import Model


class Towers(nn.Module):
    """The constructor is the schema of a recipe's [model] where kind is "towers".

    image, text: tables for a Model each, with heads that give one vector per sequence, of equal length.
    end:         the token that ends a text: what stands behind the first one is not read. Of a text that lacks it only
                 the first token is. None: a text ends with the largest number in it.
    scale:       s at the beginning.
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
        """The longest text."""
        return self.text.limit

    def forward(self, images: Tensor, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """images, as the image tower's embed takes them; tokens (texts, time) -> scores (images, texts)."""
        return self.compare(self.see(images), self.read(tokens, valid))

    def see(self, images: Tensor) -> Tensor:
        """Images as vectors of length one: (images, dim)."""
        return F.normalize(self.image(images), dim=-1)

    def read(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """Texts as vectors of length one: (texts, dim)."""
        shown = tokens if valid is None else tokens.masked_fill(~valid, -1)
        ends = (shown if self.end is None else (shown == self.end).int()).argmax(1)  # (texts,) the first of several
        time = int(ends.max()) + 1
        real = torch.arange(time, device=tokens.device) <= ends[:, None]
        return F.normalize(self.text(tokens[:, :time], None if bool(real.all()) else real), dim=-1)

    def compare(self, images: Tensor, texts: Tensor, most: float | None = None) -> Tensor:
        """Vectors (images, dim) and (texts, dim) -> scores (images, texts). most: of exp(s)."""
        scale = self.scale.exp()
        return (scale if most is None else scale.clamp(max=most)) * (images @ texts.mT)

    def draw(self, batch: int, time: int) -> dict[str, Tensor]:
        """Random inputs of the right kind, for the laws."""
        return {"images": self.image.embed.draw(batch, time), "tokens": self.text.embed.draw(batch, time)}


def apart(model: Model | Towers) -> dict[str, Model]:
    """The models that a model is made of, by name: one without a name, or two towers."""
    return model.towers if isinstance(model, Towers) else {"": model}


def _tower(side: str, table: dict, vocab: int) -> Model:
    try:
        fit(Model, table, {"vocab": vocab}, side)
        model = make(Model, table, {"vocab": vocab}, side)
    except UserError as error:
        raise error.inside(side) from error.__cause__
    if not model.head.pools or model.encoder is not None:
        raise UserError("must be an encoder or a decoder with a head that gives one vector, such as 'vector'", (side,))
    return model
