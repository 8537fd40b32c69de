"""A language of a few tokens whose every sentence can be listed."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import Memory
from regard.decode import Request

END = 0


class Heard(NamedTuple):
    hidden: Tensor  # (batch, width)


class Toy:
    """A random recurrence: what comes next depends on all that came before, and on the source where there is one.

    asked: the number of rows of every step that was taken.
    """

    def __init__(self, vocab: int, seed: int = 0, width: int = 5, ends: float = 0.0):
        dice = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=dice)

        self.vocab, self.words, self.turn, self.out = vocab, draw(vocab, width), draw(width, width), draw(width, vocab)
        self.bias = torch.zeros(vocab, dtype=torch.float64)
        self.bias[END] = ends
        self.asked: list[int] = []

    def start(self, batch: int, capacity: int, *, memory: Memory | None = None) -> Heard:
        self.capacity = capacity
        return Heard(self.turn.new_zeros(batch, len(self.turn)) if memory is None else memory.x[:, 0])

    def step(self, tokens: Tensor, state: Heard, valid: Tensor | None = None) -> tuple[Tensor, Heard]:
        self.asked.append(len(tokens))
        hidden, scores = state.hidden, []
        for column in range(tokens.shape[1]):
            new = torch.tanh(hidden @ self.turn + self.words[tokens[:, column]])
            hidden = new if valid is None else torch.where(valid[:, column, None], new, hidden)
            scores.append(2 * hidden @ self.out + self.bias)
        return torch.stack(scores, 1), Heard(hidden)

    def logprob(self, begins: list[int], said: list[int], memory: Memory | None = None) -> float:
        """Of `said`, after what it begins with."""
        scores, _ = self.step(torch.tensor([begins + said]), self.start(1, 0, memory=memory))
        logs = scores[0, len(begins) - 1 : -1].log_softmax(-1)
        return float(logs[range(len(said)), said].sum())

    def sentences(self, most: int) -> Iterator[list[int]]:
        """All that can be said with up to `most` tokens: those that end, and those that run out of room."""
        open_tokens = [token for token in range(self.vocab) if token != END]
        for length in range(1, most + 1):
            for words in product(open_tokens, repeat=length - 1):
                yield [*words, END]
        for words in product(open_tokens, repeat=most):
            yield list(words)

    def ranked(
        self, begins: list[int], most: int, penalty: float, memory: Memory | None = None
    ) -> list[tuple[float, list[int]]]:
        """Scores and sentences, best first."""
        every = [(self.logprob(begins, said, memory) / len(said) ** penalty, said) for said in self.sentences(most)]
        return sorted(every, key=lambda pair: -pair[0])


def ask(prompts: list[list[int]], most: list[int] | int, memory: Memory | None = None) -> Request:
    """Ragged prompts as a request."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([prompt + [1] * (longest - len(prompt)) for prompt in prompts])
    valid = torch.arange(longest)[None] < torch.tensor([len(prompt) for prompt in prompts])[:, None]
    limits = torch.tensor([most] * len(prompts) if isinstance(most, int) else most)
    return Request(tokens, END, limits, None if bool(valid.all()) else valid, memory)


def count(vocab: int, most: int) -> int:
    """How many sentences there are, by formula."""
    return sum((vocab - 1) ** (n - 1) for n in range(1, most + 1)) + (vocab - 1) ** most
