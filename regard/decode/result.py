"""What a decoding strategy is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from regard.core import Memory, UserError, select

SCORES = 2_500_000  # made at a time: they stay in the CPU's cache
SAME = 16  # columns that all rows of a batch begin with, from which on they are read once
Rule = Callable[[Tensor, Tensor], Tensor]  # scores (rows, vocab), what each row has said (rows, time) -> other scores


class Stepper(Protocol):
    """What strategies need of a model. Of one that has `last_hidden` and `logits` as well, as regard's models do, no
    logits are made but those of the next token, for some rows at a time."""

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

    def begin(self, model: Stepper) -> tuple[Next, Any]:
        """What may be the first new token, and the state after the prefix."""
        self._check()
        batch, same = len(self.prefix), self._same()
        state = model.start(1 if same else batch, self.room, memory=self.memory)
        if same:  # what all rows begin with is read once
            _, state = self.follow(model, self.prefix[:1, :same], state, self.prefix[:1, :0])
            state = select(state, torch.zeros(batch, dtype=torch.long, device=self.prefix.device))
        valid = None if self.valid is None else self.valid[:, same:]
        return self.follow(model, self.prefix[:, same:], state, self.prefix[:, :0], valid)

    def _same(self) -> int:
        """Columns that all rows begin with, when they are many; at least one of each row is left."""
        if len(self.prefix) < 2 or self.memory is not None:
            return 0
        alike = (self.prefix == self.prefix[:1]).all(0)[: int(self.lengths.min()) - 1]
        count = int(alike.cumprod(0).sum())
        return count if count >= SAME else 0

    def follow(
        self, model: Any, tokens: Tensor, state: Any, said: Tensor, valid: Tensor | None = None
    ) -> tuple[Next, Any]:
        """Take tokens (rows, n); what may come after the last real one of each row, which has said (rows, time) since
        its prefix, and the state after them."""
        is_hooked = getattr(model, "is_hooked", False)  # and its hooks want the logits of all
        if hasattr(model, "last_hidden") and not is_hooked:
            x, state = model.last_hidden(tokens, state, valid)
            return Next(x, model.logits, self, said, max(SCORES // model.vocab, 1)), state
        scores, state = model.step(tokens, state, valid)
        last = valid.sum(1) - 1 if valid is not None else torch.full_like(tokens[:, 0], tokens.shape[1] - 1)
        rows = torch.arange(len(scores), device=scores.device)
        return Next(scores[rows, last], lambda scores: scores.clone(), self, said, len(scores)), state

    def ruled(self, scores: Tensor, said: Tensor) -> Tensor:
        """scores (rows, vocab) after what each row has said (rows, time)."""
        return scores if self.rule is None else self.rule(scores, said)

    def _check(self) -> None:
        batch, time = self.prefix.shape
        if batch == 0 or time == 0 or not bool((self.lengths > 0).all()):
            raise UserError("there is nothing to continue: a request needs rows that begin with something")
        if self.most.shape != (batch,) or bool((self.most < 1).any()):
            raise UserError(f"a request needs room for at least one new token in each of its {batch} rows")


class Next(NamedTuple):
    """What may come next, as scores that are made when they are asked for."""

    x: Tensor  # (rows, ...) what they are made of
    make: Callable[[Tensor], Tensor]
    request: Request
    said: Tensor  # (rows, time) by each row since its prefix
    many: int  # rows whose scores are made at a time

    def each(self, work: Callable[[Tensor, slice], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `work` makes of scores (n, vocab), which are its own, and of the rows that they are of; all rows
        together. On a CPU the scores of a few rows are worked on while they are near."""
        parts = -(-len(self.x) // self.many) if self.x.device.type == "cpu" else 1
        many = -(-len(self.x) // parts)  # all about equally large
        found = []
        for begin in range(0, len(self.x), many):
            rows = slice(begin, begin + many)
            found.append(work(self.request.ruled(exact(self.make(self.x[rows])), self.said[rows]), rows))
        return found[0] if len(found) == 1 else tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def must_be_numbers(logs: Tensor) -> None:
    """Log p of something; asked once, at the first token."""
    if bool(logs.isnan().any()):
        raise UserError("the model's scores are not numbers: its weights are damaged, or its training went astray")


def exact(scores: Tensor) -> Tensor:
    """In single precision at least: sums of half numbers go wrong."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
