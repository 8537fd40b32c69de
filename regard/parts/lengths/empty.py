"""An empty canvas: the decoder inserts and deletes tokens until nothing changes.

Gu et al. 2019, "Levenshtein Transformer", arXiv:1905.11006; Stern et al. 2019, "Insertion Transformer",
arXiv:1902.03249.
"""

import torch

from regard.core import Canvases, Length, Memory


class Empty(Length):
    is_exact = False

    def __init__(self, width: int):
        super().__init__()

    def candidates(self, memory: Memory, count: int) -> Canvases:
        none = torch.zeros(len(memory.x), 1, dtype=torch.long, device=memory.x.device)
        return Canvases(none, none.to(memory.x.dtype))
