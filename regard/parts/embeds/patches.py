"""Image input: the image is cut into square patches, row by row, and each is projected to a vector.

    x_0 = the class token,     x_i = W patch_i + b,     then + p

Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words" (ViT), arXiv:2010.11929.
"""

import torch
from torch import Tensor, nn

from regard.core import Context, Embed, Norm, Position, UserError, part


class Patches(Embed):
    """Takes images (batch, channels, height, width), or the patches that `cut` makes of them (batch, time, values).

    image:    height and width, or one number for both.
    patch:    side of a patch in pixels.
    channels: channels of the image.
    token:    a learned class token comes before the patches, to be pooled by the head (pool = "first").
    before:   norm on the values of a patch.
    after:    norm on the projected vector, before its position is added (CRATE has both).
    position: position added to the vectors; None: learned, one per patch.
    norm:     norm after that (CLIP has one).
    """

    examples = (
        {"image": [9, 12], "patch": 3},
        {"image": 8, "patch": 2, "channels": 1, "token": False, "bias": False, "position": "sinusoidal"},
        {"image": 16, "patch": 4, "before": "layer", "after": "layer", "norm": "layer"},
    )

    reads = "images"

    def __init__(
        self,
        width: int,
        image: int | list,
        patch: int,
        channels: int = 3,
        token: bool = True,
        bias: bool = True,
        before: Norm | str | dict = "none",
        after: Norm | str | dict = "none",
        position: Position | str | dict | None = None,
        norm: Norm | str | dict = "none",
        dropout: float = 0.0,
    ):
        sides = (image, image) if isinstance(image, int) else tuple(image)
        whole = len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
        if not whole or min(patch, channels) < 1 or any(side % patch for side in sides):
            raise UserError(
                f"an image is {channels} channels of height and width that a patch divides, not {image} and {patch}"
            )
        count = sides[0] // patch * (sides[1] // patch) + token
        super().__init__(width, {"part": "learned", "length": count} if position is None else position, norm, dropout)
        self.sides, self.patch, self.channels, self.count = sides, patch, channels, count
        values = channels * patch**2
        self.before, self.after = part(Norm, before, width=values), part(Norm, after, width=width)
        self.into = nn.Linear(values, width, bias=bias)
        self.token = nn.Parameter(torch.empty(width).normal_(std=0.02)) if token else None

    def extent(self, tokens: Tensor) -> tuple[int, int]:
        return (tokens.shape[0], self.count) if tokens.dim() == 4 else super().extent(tokens)

    def cut(self, images: Tensor) -> Tensor:
        """Return the patches, each as channels, rows, columns, with zeros for the class token: (batch, channels,
        height, width) -> (batch, time, values)."""
        if images.shape[1:] != (self.channels, *self.sides) or not images.is_floating_point():
            wanted = ", ".join(map(str, ("batch", self.channels, *self.sides)))
            raise UserError(f"images must be numbers of shape ({wanted}), not {images.dtype} {tuple(images.shape)}")
        size = self.patch
        tiles = images.unfold(2, size, size).unfold(3, size, size)  # (batch, channels, rows, columns, size, size)
        tiles = tiles.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return tiles if self.token is None else torch.cat((torch.zeros_like(tiles[:, :1]), tiles), 1)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        if tokens.dim() == 4:
            tokens = self.cut(tokens)
        if tokens.dim() != 3 or tokens.shape[-1] != self.into.in_features or not tokens.is_floating_point():
            raise UserError(
                f"the input must be images, or patches (batch, time, {self.into.in_features}), "
                f"not {tokens.dtype} {tuple(tokens.shape)}"
            )
        x = self.after(self.into(self.before(tokens, context.valid)), context.valid)
        if self.token is not None:
            x = torch.where((context.positions == 0)[..., None], self.token, x)
        return self.add_position(x, context)

    def random_input(self, batch: int, time: int) -> Tensor:
        return torch.randn(batch, time, self.into.in_features, dtype=self.into.weight.dtype)

    def flops(self, length: int) -> int:
        return 2 * length * self.into.weight.numel()
