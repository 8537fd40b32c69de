"""Beam search: the best few beginnings are kept at every step, all sentences of a batch side by side.

    score = log p(answer) / length^penalty           length counts the end mark; 0: plain sum; 1: mean per token

The first neural use: Sutskever et al. 2014, arXiv:1409.3215. Division by the length: Cho et al. 2014, arXiv:1409.1259.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import UserError, select
from regard.native.decode import likeliest as best_words
from regard.native.matmul import pack_matrix
from regard.ops.cross_entropy import BITS
from regard.ops.dispatch import inference_kernels, note, refused
from regard.ops.top_k import top

from .result import Hypothesis, Next, Request, Stepper, must_be_numbers
from .session import session

EARLY_STOPPING = ("full", "heuristic", "never")
TOP_K = "top-k of logits"
FEW = 24  # rows, below which their words are found without the table in another order


@torch.no_grad()
def beam(
    model: Stepper,
    request: Request,
    size: int = 5,
    length_penalty: float = 1.0,
    num_return: int = 1,
    early_stopping: str = "full",
) -> list[list[Hypothesis]]:
    """Return the `num_return` best answers for every row, best first; fewer where there are not so many. A hypothesis
    that reaches its maximum length counts as an answer, too.

    size: the hypotheses that are kept.
    length_penalty: the exponent of the length; below 1 favours short answers.
    early_stopping: when a sentence is done. full: `size` hypotheses have ended; heuristic: no open hypothesis is more
        probable than the `num_return` that have ended; never: nothing can beat these.
    """
    if early_stopping not in EARLY_STOPPING:
        raise UserError(f"early_stopping is one of {', '.join(EARLY_STOPPING)}, not '{early_stopping}'")
    if not 1 <= num_return <= size:
        raise UserError(f"beam search needs 1 <= num_return <= size, not {num_return} and size {size}")
    model = session(model)
    coming, state = request.begin(model)
    choose, reorder = chooser(model, request, 2 * size), getattr(model, "reorder", select)
    batch = len(request.prefix)
    totals = coming.x.new_zeros(batch, 1, dtype=torch.promote_types(coming.x.dtype, torch.float32))
    answers = Answers(batch, size, num_return, length_penalty, totals, request.ahead)
    # totals (live, beams): log p of what is said
    rows = torch.arange(batch, device=totals.device)  # (live,) the sentences that are still searched
    said = request.prefix.new_empty(batch, 1, 0)  # (live, beams, length); at first there is one beginning
    while True:
        beams, length = totals.shape[1], said.shape[2] + 1
        logs, tokens = choose(coming)
        if length == 1:
            must_be_numbers(logs)
        totals, parents, tokens = grow(totals, logs, tokens, 2 * size)
        ends = tokens == request.end
        answers.add(rows, ends[:, :size], totals, said, parents, length, ended=True)
        totals, order = totals.masked_fill(ends, -torch.inf).topk(size, -1)  # the best that go on
        parents, tokens = parents.gather(1, order), tokens.gather(1, order)
        said = torch.cat((said.gather(1, parents[..., None].expand(-1, -1, length - 1)), tokens[..., None]), -1)
        most = request.most[rows]
        going = ~answers.are_done(rows, totals[:, 0], length, most, early_stopping)
        full = (going & (most <= length))[:, None].expand_as(totals)
        own = torch.arange(size, device=rows.device).expand_as(totals)
        answers.add(rows, full, totals, said, own, length, ended=False)
        stay = (going & (most > length)).nonzero()[:, 0]
        if not len(stay):
            return answers.sorted()
        first = torch.arange(len(rows), device=rows.device)[:, None] * beams
        state = reorder(state, (first + parents)[stay].flatten())
        rows, totals, said = rows[stay], totals[stay], said[stay]
        flat = said.flatten(0, 1)
        coming, state = request.follow(model, flat[:, -1:], state, flat)


def chooser(model: Stepper, request: Request, wide: int) -> Callable[[Next], tuple[Tensor, Tensor]]:
    """How the `wide` likeliest next tokens are found, as `likeliest` tells them: in one go where all scores are one
    product, nobody changes them, and a kernel of our own can."""
    known = model.output_projection() if request.rule is None and hasattr(model, "output_projection") else None
    fast = None if known is None else inference_kernels(known[1])
    if known is None or fast is None or wide > min(fast.keep, len(known[1])) or not known[1].is_contiguous():
        if known is None:
            why = "logits are not one product with a table, or a rule changes them"
        else:
            why = refused(known[1]) or "too many are wanted, or the table is not contiguous"

        def in_turn(coming: Next) -> tuple[Tensor, Tensor]:
            note(TOP_K, why)
            return likeliest(coming, wide)

        return in_turn
    before, table, bias = known
    packed: list[Tensor] = []

    def choose(coming: Next) -> tuple[Tensor, Tensor]:
        if len(coming.x) < FEW:  # and not worth a copy of the table
            note(TOP_K, f"fewer than {FEW} rows, which are not worth a packed copy of the table")
            return likeliest(coming, wide)
        note(TOP_K)
        packed[:] = packed or [pack_matrix(fast, table.T).numbers]
        return best_words(fast, before(coming.x).contiguous(), packed[0], bias, len(table), wide)

    return choose


def likeliest(coming: Next, wide: int) -> tuple[Tensor, Tensor]:
    """Of each row, the `wide` likeliest next tokens, best first: log p and numbers, (rows, wide) each."""

    def choose(scores: Tensor, _: slice) -> tuple[Tensor, Tensor]:
        best, tokens = top(scores, min(wide, scores.shape[-1]))
        most = best[:, :1].clamp(min=torch.finfo(best.dtype).min)
        powers = torch.add(most * -BITS, scores, alpha=BITS, out=scores).exp2_()  # which is faster than exp
        mass = powers.sum(-1, keepdim=True)
        return best - most - mass.log(), tokens

    logs, tokens = coming.each(choose)
    return logs, tokens


def grow(totals: Tensor, logs: Tensor, tokens: Tensor, wide: int) -> tuple[Tensor, Tensor, Tensor]:
    """totals (live, beams), logs and tokens (live * beams, n) -> the best `wide` continuations, best first: their
    totals, the beams that they continue, and their tokens, (live, wide) each. Where there are fewer, hopeless ones fill
    up."""
    live, each = len(totals), logs.shape[1]
    sums = (logs.view(live, -1, each) + totals[..., None]).flatten(1)
    totals, flat = sums.topk(min(wide, sums.shape[1]), -1)
    lack = wide - totals.shape[1]
    totals, flat = F.pad(totals, (0, lack), value=-torch.inf), F.pad(flat, (0, lack))
    return totals, flat // each, tokens.view(live, -1).gather(1, flat)


class Answers:
    """What is done, for every sentence of the batch."""

    def __init__(self, batch: int, size: int, num_return: int, length_penalty: float, like: Tensor, ahead: int = 0):
        self.num_return, self.length_penalty, self.ahead = num_return, length_penalty, ahead
        self.found: list[list[Hypothesis]] = [[] for _ in range(batch)]
        self.held = like.new_full((batch, size), -torch.inf)  # the best scores found, best first
        self.sums = like.new_full((batch, num_return), -torch.inf)  # the most probable found, by log p alone

    def add(
        self, rows: Tensor, chosen: Tensor, totals: Tensor, said: Tensor, beams: Tensor, length: int, ended: bool
    ) -> None:
        """Of the candidates (live, n) with `totals` that continue `beams` of `said`: those `chosen` are done."""
        totals, beams = totals[:, : chosen.shape[1]], beams[:, : chosen.shape[1]]
        chosen = chosen & (totals > -torch.inf)
        sentence, candidate = chosen.nonzero(as_tuple=True)
        if not len(sentence):
            return
        done = totals[sentence, candidate]
        weight = (length + self.ahead) ** self.length_penalty
        told = (rows[sentence], done, done / weight, said[sentence, beams[sentence, candidate]])
        for row, total, score, tokens in zip(*(t.tolist() for t in told), strict=True):
            self.found[row].append(Hypothesis(tokens, score, total, ended))
        sums = totals.masked_fill(~chosen, -torch.inf)
        for held, new in ((self.held, sums / weight), (self.sums, sums)):
            held[rows] = torch.cat((held[rows], new), 1).topk(held.shape[1], -1).values

    def are_done(self, rows: Tensor, top: Tensor, length: int, most: Tensor, early_stopping: str) -> Tensor:
        """(live,) where search is over. `top` is the best unfinished sum, which can only fall."""
        if early_stopping == "heuristic":
            return self.sums[rows, -1] >= top
        held = self.held[rows]
        if early_stopping == "full":
            return (held[:, -1] > -torch.inf) | (top == -torch.inf)
        kindest = most if self.length_penalty > 0 else most.clamp(max=length + 1)  # the length that is
        return held[:, self.num_return - 1] >= top / (kindest + self.ahead).to(top.dtype) ** self.length_penalty

    def sorted(self) -> list[list[Hypothesis]]:
        return [sorted(answers, key=lambda one: -one.score)[: self.num_return] for answers in self.found]
