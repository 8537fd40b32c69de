"""Speculative decoding: a draft guesses several tokens, and the model verifies all of them in one step.

A guess is accepted only where it is the very token that the model chooses there. Since the random number for a token
depends on its row and position alone, that also holds for sampling: the answers are those of the model alone.
After a step with wrong guesses, decoding continues from the state before it: the law `again`.

Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. Guesses from n-grams of the text: Saxena
2023, "Prompt Lookup Decoding".
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from regard.core import UserError, select

from .result import Hypothesis, Request, Stepper, at_least_float32, check_not_nan
from .sample import OnToken, SamplingParams, Seeds, choose_tokens, uniform_noise
from .session import session

MAX_UNREAD = 12  # accepted tokens that are read again with new guesses, before a step adds them to the state
MAX_GUESSES = 48  # at a time: a cache that drops keys can undo a step of at most 64 positions


class Draft(Protocol):
    """Guesses the next tokens of each row from all its tokens: up to `count` tokens, or none."""

    def __call__(self, sequences: list[list[int]], count: int) -> list[list[int]]: ...


class NgramDraft:
    """Guesses the tokens that followed the last occurrence of the row's last n-gram: for texts that repeat themselves
    and answers that quote their prompt.

    longest, shortest: lengths of the n-grams, the longest tried first.
    """

    def __init__(self, longest: int = 4, shortest: int = 2):
        self.longest, self.shortest = longest, shortest

    def __call__(self, sequences: list[list[int]], count: int) -> list[list[int]]:
        return [self._guess(row, count) for row in sequences]

    def _guess(self, row: list[int], count: int) -> list[int]:
        for size in range(min(self.longest, len(row) - 1), self.shortest - 1, -1):
            for at in range(len(row) - size - 1, -1, -1):
                if row[at : at + size] == row[-size:]:
                    return row[at + size : at + size + count]
        return []


class ModelDraft:
    """Guesses greedily by another decoder over the same vocabulary.

    capacity: the positions that its state must hold.
    """

    def __init__(self, model: Stepper, capacity: int):
        self.model, self.capacity = session(model), capacity
        self.state: Any = None
        self.read: list[list[int]] = []  # the tokens of each row that are in the state

    @torch.no_grad()
    def __call__(self, sequences: list[list[int]], count: int) -> list[list[int]]:
        if not self._goes_on(sequences):
            self.state, self.read = self.model.start(len(sequences), self.capacity), [[] for _ in sequences]
        new = [row[len(old) :] for row, old in zip(sequences, self.read, strict=True)]
        scores, self.state = _step(self.model, new, self.state)
        self.read = [list(row) for row in sequences]
        last = scores[range(len(new)), [len(row) - 1 for row in new]]
        state, guesses = self.state, [last.argmax(-1).tolist()]
        while len(guesses) < count:
            scores, state = _step(self.model, [[token] for token in guesses[-1]], state)
            guesses.append(scores[:, 0].argmax(-1).tolist())
        return [list(row) for row in zip(*guesses, strict=True)]

    def _goes_on(self, sequences: list[list[int]]) -> bool:
        """Return whether every row continues what was read of it."""
        return len(sequences) == len(self.read) and all(
            len(row) > len(old) and row[: len(old)] == old for row, old in zip(sequences, self.read, strict=True)
        )


@torch.no_grad()
def speculate(
    model: Stepper,
    request: Request,
    draft: Draft,
    guesses: int = 4,
    sampling: SamplingParams | None = None,
    seeds: Seeds | None = None,
    on_token: OnToken | None = None,
) -> list[Hypothesis]:
    """Return the answers of `sample`, faster where the draft guesses well.

    guesses: tokens that are guessed at a time.
    """
    if not 1 <= guesses <= MAX_GUESSES:
        raise UserError(f"a draft makes from 1 to {MAX_GUESSES} guesses at a time, not {guesses}")
    sampling = sampling or SamplingParams()
    batch, device = request.prefix.shape[0], request.prefix.device
    noise = uniform_noise(seeds, batch, int(request.max_new_tokens.max()), device) if sampling.temperature else None
    max_new_tokens = request.max_new_tokens.tolist()
    sequences = [row[:length] for row, length in zip(request.prefix.tolist(), request.lengths.tolist(), strict=True)]
    generated: list[list[int]] = [[] for _ in sequences]
    logs = [0.0] * batch

    def choose(row: int, scores: Tensor) -> int:
        """Choose the next token of a row by scores (vocab,), and append it."""
        before = torch.tensor([sequences[row]], device=device)
        chance = None if noise is None else noise[row : row + 1, len(generated[row])]
        token, log = choose_tokens(scores[None], before, chance, sampling)
        generated[row].append(int(token))
        sequences[row].append(int(token))
        logs[row] += float(log)
        if on_token and generated[row][-1] != request.end:
            on_token(row, generated[row][-1])
        return generated[row][-1]

    def over(row: int) -> bool:
        return generated[row][-1] == request.end or len(generated[row]) >= max_new_tokens[row]

    model = session(model)
    upcoming, state = request.begin(model)
    (first,) = upcoming.map_chunks(lambda scores, _: (scores,))
    check_not_nan(first.logsumexp(-1))
    rows, in_state = list(range(batch)), [0] * batch  # unfinished rows; generated tokens in the state
    for row in rows:
        choose(row, first[row])
    while going := [i for i, row in enumerate(rows) if not over(row)]:
        if len(going) < len(rows):
            state, rows = select(state, torch.tensor(going, device=device)), [rows[i] for i in going]
        if max(len(generated[row]) - in_state[row] for row in rows) > MAX_UNREAD:
            _, state = _step(model, [generated[row][in_state[row] : -1] for row in rows], state)
            in_state = [len(words) - 1 for words in generated]
        remaining = [max_new_tokens[row] - len(generated[row]) - 1 for row in rows]
        drafted = (
            draft([sequences[row] for row in rows], min(guesses, max(remaining)))
            if max(remaining) > 0
            else [[] for _ in rows]
        )
        drafted = [guess[:left] for guess, left in zip(drafted, remaining, strict=True)]
        fed = [[*generated[row][in_state[row] :], *guess] for row, guess in zip(rows, drafted, strict=True)]
        scores, after = _step(model, fed, state)
        right = True  # whether all guesses were accepted
        for row, tokens, guess, row_logits in zip(rows, fed, drafted, at_least_float32(scores), strict=True):
            for at in range(len(tokens) - len(guess) - 1, len(tokens)):
                words = torch.tensor([generated[row]], device=device)
                token = choose(row, request.process_logits(row_logits[at : at + 1], words)[0])
                if over(row) or at + 1 == len(tokens) or token != tokens[at + 1]:
                    right = right and at + 1 == len(tokens)
                    break
        if right:
            state = after
            for row in rows:
                in_state[row] = len(generated[row]) - 1
        del after  # so that the next step can use its buffers
    ended = [words[-1] == request.end for words in generated]
    return [
        Hypothesis(words[:-1] if done else words, log, log, done)
        for words, log, done in zip(generated, logs, ended, strict=True)
    ]


def _step(model: Stepper, rows: list[list[int]], state: Any) -> tuple[Tensor, Any]:
    """Take the next tokens of each row, whose numbers may differ."""
    device = state.lengths.device if hasattr(state, "lengths") else None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    widest = max(int(lengths.max()), 1)
    tokens = torch.tensor([[*row, *[0] * (widest - len(row))] for row in rows], device=device)
    valid = torch.arange(widest, device=device)[None] < lengths[:, None]
    return model.step(tokens, state, None if bool(valid.all()) else valid)
