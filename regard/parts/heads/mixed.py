"""Logits from a final mixer, so that they depend on other positions too, as in graph attention.

logits = mixer(x), with as many output channels as there are classes
"""

from torch import Tensor

from regard.core import Context, Head, Mixer, UserError, part


class Mixed(Head):
    """mixer: the mixer; its `dim` is the number of classes.
    classes:  number of classes; None: the size of the vocabulary.
    """

    streams = False
    examples = ({"mixer": {"part": "gat", "join": "mean", "heads": 2}, "classes": 7}, {"mixer": "gatv2"})

    def __init__(self, width: int, vocab: int, mixer: Mixer | str | dict, classes: int | None = None):
        super().__init__()
        self.classes = vocab if classes is None else classes
        if self.classes < 2:
            raise UserError(f"classes must be at least 2, not {self.classes}")
        self.mixer = part(Mixer, mixer, width=width, heads=1, dim=self.classes)
        if self.mixer.out_width != self.classes:
            raise UserError(
                f"the mixer has {self.mixer.out_width} output channels and there are {self.classes} classes: use one "
                "head, or the mean of several"
            )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return logits (batch, time, classes)."""
        return self.mixer(x, context)

    def flops(self, length: int) -> int:
        return self.mixer.cost(length).flops
