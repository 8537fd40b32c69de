"""A last mixer gives the scores itself, so that what stands around a position has its say in them: graph attention.

scores = mixer(x), as many channels as there are classes
"""

from torch import Tensor

from regard.core import Context, Head, Mixer, UserError, part


class Mixed(Head):
    """mixer: takes the classes as the channels of its heads.
    classes:  how many; None: the vocabulary.
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
                f"the mixer gives {self.mixer.out_width} channels and there are {self.classes} classes: one head, or "
                "the mean of several"
            )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(batch, time, classes)"""
        return self.mixer(x, context)

    def flops(self, length: int) -> int:
        return self.mixer.cost(length).flops
