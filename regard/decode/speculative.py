"""Several tokens for the price of one: a draft guesses what comes next, and the model reads all guesses in one step.

A guess stands only where it is the very token that the model chooses there. Since the chance that decides about a token
belongs to its row and its place, that is also so where tokens are drawn: the answers are those of the model alone.
A step that turns out to have read wrong guesses is taken back: the law `again`.

Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. Guesses from what was said before: Saxena
2023, "Prompt Lookup Decoding".
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from regard.core import UserError, select

from .result import Hypothesis, Request, Stepper, exact, must_be_numbers
from .sample import Listen, SamplingParams, Seeds, chosen, noise_of
from .session import session

LONG = 12  # tokens that are read again with new guesses, before they become part of the state
MOST = 48  # guesses at a time: a cache that forgets can take back a step of 64 positions, and no longer one


class Draft(Protocol):
    """Guesses how each row goes on, from all that it holds: up to `count` tokens, or none."""

    def __call__(self, held: list[list[int]], count: int) -> list[list[int]]: ...


class NgramDraft:
    """What came after the same few tokens when they last stood in the row: texts that repeat themselves, answers that
    quote their prompt.

    most, least: tokens that must be the same; as many as possible are tried first.
    """

    def __init__(self, most: int = 4, least: int = 2):
        self.most, self.least = most, least

    def __call__(self, held: list[list[int]], count: int) -> list[list[int]]:
        return [self._guess(row, count) for row in held]

    def _guess(self, row: list[int], count: int) -> list[int]:
        for size in range(min(self.most, len(row) - 1), self.least - 1, -1):
            for at in range(len(row) - size - 1, -1, -1):
                if row[at : at + size] == row[-size:]:
                    return row[at + size : at + size + count]
        return []


class ModelDraft:
    """Another model over the same tokens, greedily; for rows that look at no source.

    room: positions that it will be asked for.
    """

    def __init__(self, model: Stepper, room: int):
        self.model, self.room = session(model), room
        self.state: Any = None
        self.read: list[list[int]] = []  # what the state holds of each row

    @torch.no_grad()
    def __call__(self, held: list[list[int]], count: int) -> list[list[int]]:
        if not self._goes_on(held):
            self.state, self.read = self.model.start(len(held), self.room), [[] for _ in held]
        new = [row[len(old) :] for row, old in zip(held, self.read, strict=True)]
        scores, self.state = _step(self.model, new, self.state)
        self.read = [list(row) for row in held]
        last = scores[range(len(new)), [len(row) - 1 for row in new]]
        state, guesses = self.state, [last.argmax(-1).tolist()]
        while len(guesses) < count:
            scores, state = _step(self.model, [[token] for token in guesses[-1]], state)
            guesses.append(scores[:, 0].argmax(-1).tolist())
        return [list(row) for row in zip(*guesses, strict=True)]

    def _goes_on(self, held: list[list[int]]) -> bool:
        """Every row holds what it held, and more."""
        return len(held) == len(self.read) and all(
            len(row) > len(old) and row[: len(old)] == old for row, old in zip(held, self.read, strict=True)
        )


@torch.no_grad()
def speculate(
    model: Stepper,
    request: Request,
    draft: Draft,
    guesses: int = 4,
    sampling: SamplingParams | None = None,
    seeds: Seeds | None = None,
    listen: Listen | None = None,
) -> list[Hypothesis]:
    """What `sample` says, sooner where the draft guesses well.

    guesses: tokens that are guessed at a time.
    """
    if not 1 <= guesses <= MOST:
        raise UserError(f"a draft makes from 1 to {MOST} guesses at a time, not {guesses}")
    sampling = sampling or SamplingParams()
    batch, device = request.prefix.shape[0], request.prefix.device
    noise = noise_of(seeds, batch, int(request.most.max()), device) if sampling.temperature else None
    most = request.most.tolist()
    held = [row[:length] for row, length in zip(request.prefix.tolist(), request.lengths.tolist(), strict=True)]
    said: list[list[int]] = [[] for _ in held]
    logs = [0.0] * batch

    def choose(row: int, scores: Tensor) -> int:
        """The next token of a row, by scores (vocab,)."""
        before = torch.tensor([held[row]], device=device)
        chance = None if noise is None else noise[row : row + 1, len(said[row])]
        token, log = chosen(scores[None], before, chance, sampling)
        said[row].append(int(token))
        held[row].append(int(token))
        logs[row] += float(log)
        if listen and said[row][-1] != request.end:
            listen(row, said[row][-1])
        return said[row][-1]

    def over(row: int) -> bool:
        return said[row][-1] == request.end or len(said[row]) >= most[row]

    model = session(model)
    coming, state = request.begin(model)
    (first,) = coming.each(lambda scores, _: (scores,))
    must_be_numbers(first.logsumexp(-1))
    rows, known = list(range(batch)), [0] * batch  # those that go on, and how much of what they said is in the state
    for row in rows:
        choose(row, first[row])
    while going := [i for i, row in enumerate(rows) if not over(row)]:
        if len(going) < len(rows):
            state, rows = select(state, torch.tensor(going, device=device)), [rows[i] for i in going]
        if max(len(said[row]) - known[row] for row in rows) > LONG:
            _, state = _step(model, [said[row][known[row] : -1] for row in rows], state)
            known = [len(words) - 1 for words in said]
        room = [most[row] - len(said[row]) - 1 for row in rows]
        drafted = draft([held[row] for row in rows], min(guesses, max(room))) if max(room) > 0 else [[] for _ in rows]
        drafted = [guess[:left] for guess, left in zip(drafted, room, strict=True)]
        fed = [[*said[row][known[row] :], *guess] for row, guess in zip(rows, drafted, strict=True)]
        scores, after = _step(model, fed, state)
        right = True  # all guesses were
        for row, tokens, guess, told in zip(rows, fed, drafted, exact(scores), strict=True):
            for at in range(len(tokens) - len(guess) - 1, len(tokens)):
                words = torch.tensor([said[row]], device=device)
                token = choose(row, request.ruled(told[at : at + 1], words)[0])
                if over(row) or at + 1 == len(tokens) or token != tokens[at + 1]:
                    right = right and at + 1 == len(tokens)
                    break
        if right:
            state = after
            for row in rows:
                known[row] = len(said[row]) - 1
        del after  # so that the next step can use its buffers
    ended = [words[-1] == request.end for words in said]
    return [
        Hypothesis(words[:-1] if done else words, log, log, done)
        for words, log, done in zip(said, logs, ended, strict=True)
    ]


def _step(model: Stepper, rows: list[list[int]], state: Any) -> tuple[Tensor, Any]:
    """Take the next tokens of each row, of some more than of others."""
    device = state.lengths.device if hasattr(state, "lengths") else None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    widest = max(int(lengths.max()), 1)
    tokens = torch.tensor([[*row, *[0] * (widest - len(row))] for row in rows], device=device)
    valid = torch.arange(widest, device=device)[None] < lengths[:, None]
    return model.step(tokens, state, None if bool(valid.all()) else valid)
