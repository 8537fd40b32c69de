"""Beam search: the best few hypotheses are kept at every step, for all sequences of a batch together.

    score = log p(answer) / length^penalty       the length includes the end token; 0: plain sum; 1: mean per token

The first neural use: Sutskever et al. 2014, arXiv:1409.3215. Division by the length: Cho et al. 2014, arXiv:1409.1259.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import UserError, select
from regard.native.decode import top_k as best_words
from regard.native.matmul import pack_matrix
from regard.ops.cross_entropy import LOG2_E
from regard.ops.dispatch import inference_kernels, note, why_no_kernels
from regard.ops.top_k import top_k

from .fused_search import fused_search
from .result import Hypothesis, NextLogits, Request, Stepper, check_not_nan
from .session import Session, session

EARLY_STOPPING = ("full", "heuristic", "never")
MIN_PACKED_ROWS = 24  # rows, below which packing the output table does not pay
TOP_K = "top-k of logits"  # the name of the op in dispatch


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
    length_penalty: the exponent of the length; below 1 favors short answers.
    early_stopping: when a sentence is done. full: `size` hypotheses have ended; heuristic: no open hypothesis is more
        probable than the `num_return` that have ended; never: nothing can beat these.
    """
    if early_stopping not in EARLY_STOPPING:
        raise UserError(f"early_stopping is one of {', '.join(EARLY_STOPPING)}, not '{early_stopping}'")
    if not 1 <= num_return <= size:
        raise UserError(f"beam search needs 1 <= num_return <= size, not {num_return} and size {size}")
    model = session(model)
    if early_stopping == "full" and isinstance(model, Session):
        found = fused_search(model, request, size, length_penalty, num_return)
        if found is not None:
            return [found]
    upcoming, state = request.begin(model)
    choose, reorder = token_chooser(model, request, 2 * size), getattr(model, "reorder", select)
    batch = len(request.prefix)
    totals = upcoming.x.new_zeros(batch, 1, dtype=torch.promote_types(upcoming.x.dtype, torch.float32))
    answers = FinishedHypotheses(batch, size, num_return, length_penalty, totals, request.counted_prefix)
    # totals (live, beams): log p of each open hypothesis
    rows = torch.arange(batch, device=totals.device)  # (live,) the sequences that are still searched
    generated = request.prefix.new_empty(batch, 1, 0)  # (live, beams, length); at first there is one hypothesis
    while True:
        beams, length = totals.shape[1], generated.shape[2] + 1
        logs, tokens = choose(upcoming)
        if length == 1:
            check_not_nan(logs)
        totals, parents, tokens = extend(totals, logs, tokens, 2 * size)
        ends = tokens == request.end
        answers.add(rows, ends[:, :size], totals, generated, parents, length, ended=True)
        totals, order = totals.masked_fill(ends, -torch.inf).topk(size, -1)  # the best open hypotheses
        parents, tokens = parents.gather(1, order), tokens.gather(1, order)
        generated = torch.cat(
            (generated.gather(1, parents[..., None].expand(-1, -1, length - 1)), tokens[..., None]), -1
        )
        max_new_tokens = request.max_new_tokens[rows]
        going = ~answers.are_done(rows, totals[:, 0], length, max_new_tokens, early_stopping)
        full = (going & (max_new_tokens <= length))[:, None].expand_as(totals)
        own = torch.arange(size, device=rows.device).expand_as(totals)
        answers.add(rows, full, totals, generated, own, length, ended=False)
        stay = (going & (max_new_tokens > length)).nonzero()[:, 0]
        if not len(stay):
            return answers.sorted()
        first = torch.arange(len(rows), device=rows.device)[:, None] * beams
        state = reorder(state, (first + parents)[stay].flatten())
        rows, totals, generated = rows[stay], totals[stay], generated[stay]
        flat = generated.flatten(0, 1)
        upcoming, state = request.follow(model, flat[:, -1:], state, flat)


def token_chooser(model: Stepper, request: Request, k: int) -> Callable[[NextLogits], tuple[Tensor, Tensor]]:
    """Return the function that finds the k most probable next tokens, like `top_tokens`: by one kernel where the logits
    are one matrix product and no logits processor changes them."""
    projection = (
        model.output_projection() if request.logits_processor is None and hasattr(model, "output_projection") else None
    )
    kernels = None if projection is None else inference_kernels(projection[1])
    if (
        projection is None
        or kernels is None
        or k > min(kernels.keep, len(projection[1]))
        or not projection[1].is_contiguous()
    ):
        if projection is None:
            why = "the logits are not one matrix product, or a logits processor changes them"
        else:
            why = why_no_kernels(projection[1]) or "k is too large, or the output table is not contiguous"

        def choose_from_logits(upcoming: NextLogits) -> tuple[Tensor, Tensor]:
            note(TOP_K, why)
            return top_tokens(upcoming, k)

        return choose_from_logits
    before, table, bias = projection
    packed: list[Tensor] = []

    def choose(upcoming: NextLogits) -> tuple[Tensor, Tensor]:
        if not upcoming.is_hidden or getattr(model, "is_head_touched", False):
            note(TOP_K, "the model or its head was hooked or replaced meanwhile")
            return top_tokens(upcoming, k)
        if len(upcoming.x) < MIN_PACKED_ROWS:  # not worth a packed copy of the table
            note(TOP_K, f"fewer than {MIN_PACKED_ROWS} rows, which are not worth a packed copy of the output table")
            return top_tokens(upcoming, k)
        note(TOP_K)
        packed[:] = packed or [pack_matrix(kernels, table.T).numbers]
        return best_words(kernels, before(upcoming.x).contiguous(), packed[0], bias, len(table), k)

    return choose


def top_tokens(upcoming: NextLogits, k: int) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and the ids of the k most probable next tokens, best first, (rows, k) each."""

    def choose(scores: Tensor, _: slice) -> tuple[Tensor, Tensor]:
        best, tokens = top_k(scores, min(k, scores.shape[-1]))
        most = best[:, :1].clamp(min=torch.finfo(best.dtype).min)
        powers = torch.add(most * -LOG2_E, scores, alpha=LOG2_E, out=scores).exp2_()  # which is faster than exp
        mass = powers.sum(-1, keepdim=True)
        return best - most - mass.log(), tokens

    logs, tokens = upcoming.map_chunks(choose)
    return logs, tokens


def extend(totals: Tensor, logs: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """totals (live, beams), logs and tokens (live * beams, n) -> the best `count` continuations, best first: their
    totals, the beams that they continue, and their tokens, (live, count) each, padded with totals of -inf."""
    live, each = len(totals), logs.shape[1]
    sums = (logs.view(live, -1, each) + totals[..., None]).flatten(1)
    totals, flat = sums.topk(min(count, sums.shape[1]), -1)
    lack = count - totals.shape[1]
    totals, flat = F.pad(totals, (0, lack), value=-torch.inf), F.pad(flat, (0, lack))
    return totals, flat // each, tokens.view(live, -1).gather(1, flat)


class FinishedHypotheses:
    """The hypotheses that have ended, for every sequence of the batch."""

    def __init__(
        self, batch: int, size: int, num_return: int, length_penalty: float, like: Tensor, counted_prefix: int = 0
    ):
        self.num_return, self.length_penalty, self.counted_prefix = num_return, length_penalty, counted_prefix
        self.found: list[list[Hypothesis]] = [[] for _ in range(batch)]
        self.best_scores = like.new_full((batch, size), -torch.inf)  # of finished hypotheses, best first
        self.best_logprobs = like.new_full((batch, num_return), -torch.inf)  # of the most probable finished hypotheses

    def add(
        self, rows: Tensor, chosen: Tensor, totals: Tensor, generated: Tensor, beams: Tensor, length: int, ended: bool
    ) -> None:
        """Add the `chosen` candidates (live, n), which have `totals` and continue `beams` of `generated`."""
        totals, beams = totals[:, : chosen.shape[1]], beams[:, : chosen.shape[1]]
        chosen = chosen & (totals > -torch.inf)
        sentence, candidate = chosen.nonzero(as_tuple=True)
        if not len(sentence):
            return
        done = totals[sentence, candidate]
        weight = (length + self.counted_prefix) ** self.length_penalty
        columns = (rows[sentence], done, done / weight, generated[sentence, beams[sentence, candidate]])
        for row, total, score, tokens in zip(*(t.tolist() for t in columns), strict=True):
            self.found[row].append(Hypothesis(tokens, score, total, ended))
        logprobs = totals.masked_fill(~chosen, -torch.inf)
        for best, new in ((self.best_scores, logprobs / weight), (self.best_logprobs, logprobs)):
            best[rows] = torch.cat((best[rows], new), 1).topk(best.shape[1], -1).values

    def are_done(self, rows: Tensor, top: Tensor, length: int, max_new_tokens: Tensor, early_stopping: str) -> Tensor:
        """Return (live,) whether each search is over. `top` is the best open total, which can only fall."""
        if early_stopping == "heuristic":
            return self.best_logprobs[rows, -1] >= top
        best = self.best_scores[rows]
        if early_stopping == "full":
            return (best[:, -1] > -torch.inf) | (top == -torch.inf)
        length_bound = (
            max_new_tokens if self.length_penalty > 0 else max_new_tokens.clamp(max=length + 1)
        )  # the most favorable length
        return (
            best[:, self.num_return - 1]
            >= top / (length_bound + self.counted_prefix).to(top.dtype) ** self.length_penalty
        )

    def sorted(self) -> list[list[Hypothesis]]:
        return [sorted(answers, key=lambda one: -one.score)[: self.num_return] for answers in self.found]
