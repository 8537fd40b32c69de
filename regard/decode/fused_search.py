"""Greedy and beam search for one sentence in one call of a kernel, for all steps together.

The kernel takes the steps; what they have found is read here. It is used where a step is an embedding, a stack that can
be fused, and a product with a table, and where nothing else is asked for. beam.py and sample.py are the definition.
"""

from __future__ import annotations

import torch

from regard.core import Model
from regard.core.context import Context
from regard.native.decode import linear_params
from regard.ops.dispatch import FEW_ROWS, SEPARATE, inference_kernels, is_contiguous, note, touched, why_no_kernels

from .result import Hypothesis, Request
from .session import Session, why_changed

FUSED_SEARCH = "fused search"
METHODS = ("advance", "last_hidden", "logits", "start")  # of a model, besides those that `touched` looks for


@torch.no_grad()
def fused_search(
    session: Session, request: Request, size: int, length_penalty: float, num_return: int
) -> list[Hypothesis] | None:
    """Return the best answers to the only row of a request, best first; None where steps have to be taken one by one. A
    beam of one is greedy search."""
    found = _search(session, request, size)
    if isinstance(found, str):
        note(FUSED_SEARCH, found, SEPARATE)
        return None
    note(FUSED_SEARCH)
    hypotheses: list[tuple[float, list[int]]] = [(0.0, [])]  # that go on: their log-probabilities and tokens
    answers: list[Hypothesis] = []
    for length, continuations in enumerate(found, 1 + request.counted_prefix):
        weight = length**length_penalty
        real = [one for one in continuations if one[0] > -torch.inf]
        answers += [
            Hypothesis(hypotheses[parent][1], total / weight, total, True)
            for total, parent, token in real[:size]
            if token == request.end
        ]
        hypotheses = [
            (total, [*hypotheses[parent][1], token]) for total, parent, token in real if token != request.end
        ][:size]
    if len(answers) < size:  # the maximum length was reached
        answers += [Hypothesis(tokens, total / weight, total, False) for total, tokens in hypotheses]
    return sorted(answers, key=lambda one: -one.score)[:num_return]


def _search(session: Session, request: Request, size: int) -> list[list[tuple[float, int, int]]] | str:
    """Return the continuations of every step, best first: total log-probability, the hypothesis that is continued, and
    the token; or why the kernel cannot find them."""
    model, (rows, length) = session.model, request.prefix.shape
    if rows > 1 or size > FEW_ROWS:
        return f"more than one sentence, or a beam of more than {FEW_ROWS}"
    if request.logits_processor is not None or request.valid is not None:
        return "a logits processor changes the logits, or the prefix is padded"
    if type(model) is not Model or touched(model) or any(name in vars(model) for name in METHODS):
        return "the model is hooked, or has a method of its own"
    if what := why_changed(model.embed, "the embed") or why_changed(model.head, "the head"):
        return what
    embed, x = model.embed.fused(), next(model.parameters()).new_zeros(1, 1, model.stack.width)
    projection = model.head.linear(x, Context.begin(1, 1, x.device))
    if embed is None or projection is None or projection[0] is not x:
        return "the embed or the head does more than to look up a vector, or to multiply by a table"
    _, output, bias = projection
    if inference_kernels(x, embed.table, output, bias) is None:
        return why_no_kernels(x, embed.table, output, bias)
    if not is_contiguous(embed.table, output, bias) or not 2 * size <= len(output) <= len(embed.table):
        return "the table of the embed or the head is not contiguous, or too small"
    fused = session.compiled(model.stack, x)
    if isinstance(fused, str):
        return fused
    request.check()
    first = int(request.prefix[0, -1])
    if not 0 <= first < len(embed.table) or not embed.table.shape[1] == output.shape[1] == x.shape[2]:
        return "a token is not in the table, or vectors have another width"
    state, steps = session.start(1, request.capacity, memory=request.memory), int(request.max_new_tokens)
    if length > 1:
        _, state = session.last_hidden(request.prefix[:, :-1], state)
    context = Context.after(state.lengths, steps)
    added = embed.position.embed(x.new_zeros(1, steps, x.shape[2]), context.positions)[0].contiguous()
    if added.dtype != x.dtype:
        return "the tensors are of several dtypes"
    planned = fused.plan_search(x, state.layers, context.columns(0, 1), steps, size)
    if isinstance(planned, str):
        return planned
    program, held = planned
    state.version.history.given_up = True  # its buffers are written here, without a state that tells so
    found = program.search(
        fused.kernels, held, steps, first, request.end, embed.table, embed.scale, added, linear_params(output, bias)
    )
    if not bool(found[0][0, 0] > -torch.inf):
        return "the logits are NaN"  # which is reported by those who take single steps
    return [list(zip(*step, strict=True)) for step in zip(*(t.tolist() for t in found), strict=True)]
