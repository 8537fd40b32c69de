"""What a decoding strategy is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from regard.core import Memory, UserError

Rule = Callable[[Tensor, Tensor], Tensor]  # scores (rows, vocab), what each row has said (rows, time) -> other scores


class Stepper(Protocol):
    """What strategies need of a model."""

    def start(self, batch: int, capacity: int, *, memory: Memory | None = None) -> Any: ...

    def step(self, tokens: Tensor, state: Any, valid: Tensor | None = None) -> tuple[Tensor, Any]: ...


class Hypothesis(NamedTuple):
    """One answer."""

    tokens: list[int]  # without start and end marks
    score: float  # what answers are ranked by: the log-probability, divided by the length penalty where there is one
    logprob: float  # of the tokens and the end mark, by the model itself
    ended: bool  # by the end mark, not for lack of room


class Request(NamedTuple):
    """A batch of things to continue.

    prefix: what each row begins with, right-padded: the start mark, or a prompt.
    most:   new tokens at the most, for each row, the end mark among them.
    valid:  which columns of the prefix are real; None: all.
    rule:   what may be said next, -inf for what may not: a function of the scores and of what a row has said since its
            prefix. What is likely is then counted by what it leaves. See decode/rules.py.
    ahead:  tokens at the end of the prefixes that are part of the answers where their length counts.
    """

    prefix: Tensor  # (batch, time)
    end: int
    most: Tensor  # (batch,)
    valid: Tensor | None = None  # (batch, time)
    memory: Memory | None = None
    rule: Rule | None = None
    ahead: int = 0

    @classmethod
    def after(cls, start: int, end: int, memory: Memory, most: Tensor | int) -> Request:
        """Translate: every row begins with the start mark and looks at its own source."""
        batch, device = memory.x.shape[0], memory.x.device
        limit = torch.full((batch,), most, device=device) if isinstance(most, int) else most.to(device)
        return cls(torch.full((batch, 1), start, device=device), end, limit, None, memory)

    @property
    def lengths(self) -> Tensor:
        """(batch,) of the prefixes."""
        batch, time = self.prefix.shape
        return self.most.new_full((batch,), time) if self.valid is None else self.valid.sum(1)

    @property
    def room(self) -> int:
        """Positions that the longest row may take. The last token of an answer is never read."""
        return int((self.lengths + self.most).max()) - 1

    def begin(self, model: Stepper) -> tuple[Tensor, Any]:
        """The scores (batch, vocab) of the first new token, and the state after the prefix."""
        self._check()
        state = model.start(self.prefix.shape[0], self.room, memory=self.memory)
        scores, state = model.step(self.prefix, state, self.valid)
        rows = torch.arange(len(scores), device=scores.device)
        scores = exact(scores[rows, self.lengths - 1])
        if bool(scores.isnan().any()):
            raise UserError("the model's scores are not numbers: its weights are damaged, or its training went astray")
        return self.ruled(scores, self.prefix[:, :0]), state

    def ruled(self, scores: Tensor, said: Tensor) -> Tensor:
        """scores (rows, vocab) after what each row has said (rows, time)."""
        return scores if self.rule is None else self.rule(scores, said)

    def _check(self) -> None:
        batch, time = self.prefix.shape
        if batch == 0 or time == 0 or not bool((self.lengths > 0).all()):
            raise UserError("there is nothing to continue: a request needs rows that begin with something")
        if self.most.shape != (batch,) or bool((self.most < 1).any()):
            raise UserError(f"a request needs room for at least one new token in each of its {batch} rows")


def exact(scores: Tensor) -> Tensor:
    """In single precision at least: sums of half numbers go wrong."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
