"""A shortlist of target tokens, chosen by the source tokens: only these are scored.

The probability of a target token given a source token is learned from pairs: see data/alignment.py. L'Hostis et al.
2016, arXiv:1610.00072. Answers can change where a token is missing from the list; log p is relative to those in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.core import Model, UserError
from regard.data.alignment import TranslationTable
from regard.errors import in_one_line, short

from .result import Hypothesis, Request
from .session import session

FILE = "shortlist.safetensors"
NONE = -1


class Shortlist:
    """likely: (source vocabulary, each) the target tokens for each source token, best first, padded with NONE.
    common: (n,) the target tokens that are always listed."""

    def __init__(self, likely: Tensor, common: Tensor):
        self.likely, self.common = likely, common

    def tokens_for(self, source: Tensor) -> Tensor:
        """Return the sorted target tokens for all of these source tokens (n,)."""
        found = torch.cat((self.common.to(source.device), self.likely.to(source.device)[source.unique()].flatten()))
        return found[found != NONE].unique()

    @classmethod
    def learn(
        cls,
        pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
        vocab: tuple[int, int],
        each: int = 30,
        common: int = 200,
        always: Sequence[int] = (),
    ) -> Shortlist:
        """Learn a shortlist from pairs of token lists.

        each:   target tokens for a source token.
        common: the number of most frequent target tokens, which are always listed, as those in `always` are.
        """
        often = np.zeros(vocab[1], dtype=np.int64)

        def counted() -> Iterator[tuple[Sequence[int], Sequence[int]]]:
            for source, target in pairs:
                np.add.at(often, np.asarray(target, dtype=np.int64), 1)
                yield source, target

        table = TranslationTable.learn(counted(), vocab)
        x, y, share = table.source, table.target, table.share
        order = np.lexsort((y, -share, x))
        rank = np.arange(len(order)) - np.searchsorted(x[order], x[order])
        kept = order[rank < each]
        likely = np.full((vocab[0], each), NONE, dtype=np.int32)
        likely[x[kept], rank[rank < each]] = y[kept]
        most = np.argsort(-often, kind="stable")[:common]
        most = most[often[most] > 0]
        return cls(torch.from_numpy(likely), torch.from_numpy(np.unique([*always, *most.tolist()]).astype(np.int64)))

    def save(self, path: Path) -> None:
        part = path.with_name(f"{path.name}.part")
        try:
            save_file({"likely": self.likely, "common": self.common}, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, vocab: tuple[int, int]) -> Shortlist:
        if not path.is_file():
            raise UserError(
                f"{short(path.parent)} has no shortlist: make one by 'regard shortlist {short(path.parent)}'"
            )
        try:
            stored = load_file(path)
            likely, common = stored["likely"], stored["common"]
            if likely.dim() != 2 or common.dim() != 1 or likely.is_floating_point() or common.is_floating_point():
                raise KeyError("tables of token numbers")
            if not (likely.numel() and common.numel()) or int(common.min()) < 0:
                raise KeyError("token numbers")
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"{short(path)} cannot be read: {in_one_line(error)}") from None
        if len(likely) != vocab[0] or max(int(likely.max()), int(common.max())) >= vocab[1]:
            raise UserError(f"{short(path)} is of another vocabulary: make it anew by 'regard shortlist'")
        return cls(likely.long(), common.long())


class ShortlistedModel:
    """A model over a shortlist of tokens (n,), whose ids are their indices in the list."""

    def __init__(self, model: Model, tokens: Tensor):
        model = session(model)
        self.model, self.tokens, self.vocab = model, tokens, len(tokens)
        self.start, self.reorder, self.logits = model.start, model.reorder, model.logits_for(tokens)

    def last_hidden(self, tokens: Tensor, state: Any, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        return self.model.last_hidden(self.tokens[tokens], state, valid)

    def output_projection(self) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor | None] | None:
        projection = self.model.output_projection() if hasattr(self.model, "output_projection") else None
        if projection is None:
            return None
        before, table, bias = projection
        return before, table[self.tokens], None if bias is None else bias[self.tokens]

    def step(self, tokens: Tensor, state: Any, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        scores, state = self.model.step(self.tokens[tokens], state, valid)
        return scores[..., self.tokens], state

    def to_shortlist_ids(self, request: Request) -> Request:
        """Return the request with shortlist ids."""
        if request.logits_processor is not None:
            raise UserError("a shortlist cannot be combined with this model's logits processors")
        prefix = torch.searchsorted(self.tokens, request.prefix)
        end = int(torch.searchsorted(self.tokens, torch.tensor(request.end, device=self.tokens.device)))
        return request._replace(prefix=prefix, end=end)

    def to_vocab_ids(self, answers: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        """Return the answers with ids of the vocabulary."""
        names = self.tokens.tolist()
        return [[one._replace(tokens=[names[token] for token in one.tokens]) for one in row] for row in answers]
