"""The laws, as checks of any mixer or model.

    cuts       however a sequence is cut into steps, the output is the same, with rows of a batch at different positions
    alone      a row of a padded batch gives what it gives alone
    causal     changing later inputs changes no earlier output
    select     selecting rows and stepping is stepping and selecting rows
    join       rows of several batches continue in one batch as they would have alone
    again      a step from an older state gives the same as if later steps had not happened
    long       the same as cuts beyond every window, block, segment and eviction, in few long steps and many short ones
    branches   several continuations of one state are all right, in any order; or they are refused
    capacity   a state that was started for fewer positions grows, and an empty step changes nothing
    dropout    a step in training mode applies dropout as a forward pass does
    batches    an answer of a decoder that writes all tokens at once is the same alone and in any batch
    edited     a change to the modules or weights of a model, before or during decoding, takes effect immediately
    gradients  finite, and the same through steps as through the forward pass
    backward   the same through long steps, and through single ones where embeddings are frozen
    cost       flops and state bytes equal the counted ones

They run in float64, where equal results max_difference by less than 1e-9, and a mistake by one position does not.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.bases import Attend
from regard.core import (
    Context,
    Dropout,
    Embed,
    Memory,
    Mixer,
    Model,
    Score,
    State,
    Towers,
    UserError,
    join,
    models_in,
    select,
    state_bytes,
)
from regard.core.mixer import map_tensors
from regard.decode.session import Session
from regard.ops.dispatch import disabled, why_no_kernels

LIMIT = 1e-9


class Finding(NamedTuple):
    """The result of a check."""

    law: str
    worst: float  # largest difference, relative where values are above 1
    limit: float
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.worst <= self.limit


class Subject:
    """A common interface to mixers and models: inputs (batch, time, ...), forward, start, step. fused: a model steps
    through a decoding session, otherwise by its own `step`."""

    fused = True

    def __init__(self, module: Mixer | Model, source: int = 7):
        self.module = module.double().eval()
        self.source = source
        self.is_model = isinstance(module, Model)
        self.session = Session(module) if isinstance(module, Model) else None  # takes fused steps where possible

    @property
    def streams(self) -> bool:
        stack = self.module.stack if self.is_model else self.module  # type: ignore[union-attr]
        head = self.module.head if self.is_model else None  # type: ignore[union-attr]
        return stack.streams and (head is None or (head.streams and not head.pools))  # type: ignore[union-attr]

    def inputs(self, batch: int, time: int) -> Tensor:
        if self.is_model:
            return self.module.embed.random_input(batch, time)  # type: ignore[operator,union-attr]
        return torch.randn(batch, time, self.module.width, dtype=torch.float64)  # type: ignore[arg-type]

    def memory(self, batch: int) -> Memory | None:
        """Return a random memory with rows of different lengths; None if the model has no encoder."""
        lengths = torch.randint(1, self.source + 1, (batch,))
        lengths[0] = self.source
        valid = torch.arange(self.source)[None] < lengths[:, None]
        if not self.is_model:
            width = getattr(self.module, "memory_width", self.module.width)
            x = torch.randn(batch, self.source, width, dtype=torch.float64)  # type: ignore[arg-type]
            return Memory(x, valid, layer_outputs=(x,))
        if self.module.encoder is None:  # type: ignore[union-attr]
            return None
        source = self.module.source_embed.random_input(batch, self.source)  # type: ignore[operator,union-attr]
        return self.module.encode(source, valid)  # type: ignore[operator,union-attr]

    def forward(self, x: Tensor, valid: Tensor | None, memory: Memory | None) -> Tensor:
        if self.is_model:
            return self.module(x, valid=valid, memory=memory)
        return self.module(x, Context.begin(*x.shape[:2], valid=valid, memory=memory))

    def start(self, batch: int, capacity: int, memory: Memory | None) -> State:
        if self.is_model:
            return self.module.start(batch, capacity, memory=memory)  # type: ignore[operator,union-attr]
        context = Context.begin(batch, 0, memory=memory)
        return State.of_new_buffers(torch.zeros(batch, dtype=torch.long), self.module.start(context, capacity))  # type: ignore

    def step(self, x: Tensor, state: State, valid: Tensor | None) -> tuple[Tensor, State]:
        if self.is_model:
            stepper = self.session if self.fused else self.module
            return stepper.step(x, state, valid)  # type: ignore[operator,union-attr]
        context = Context.after(state.lengths, x.shape[1], valid=valid)
        y, inner = self.module.step(x, state.layers, context)  # type: ignore[operator,union-attr]
        return y, State.of_new_buffers(state.lengths + context.lengths, inner)

    def reorder(self, state: State, rows: Tensor) -> State:
        if self.is_model:
            return self.module.reorder(state, rows)  # type: ignore[operator,union-attr]
        return State.of_new_buffers(state.lengths[rows], self.module.reorder(state.layers, rows, {}))  # type: ignore[operator,union-attr]


def max_difference(one: Tensor, two: Tensor) -> float:
    """Return the largest difference, relative where values are above 1; infinity for NaN."""
    if one.numel() == 0:
        return 0.0
    gap = (one - two).abs() / two.abs().clamp(min=1)
    return float("inf") if not bool(torch.isfinite(gap).all()) else float(gap.max())


def select_memory(memory: Memory | None, rows: Tensor) -> Memory | None:
    return None if memory is None else select(memory, rows)


def ragged_steps(lengths: Tensor, max_step: int) -> Iterator[Tensor]:
    """Yield the random number of positions of each row in the next step, (batch,), until all rows are used up."""
    remaining = lengths.clone()
    while bool((remaining > 0).any()):
        widest = int(torch.randint(1, max_step + 1, ()))
        taken = torch.minimum(torch.randint(0, widest + 1, remaining.shape), remaining)
        if bool((taken > 0).any()):
            yield taken
            remaining = remaining - taken


def in_random_steps(subject: Subject, x: Tensor, lengths: Tensor, memory: Memory | None, max_step: int) -> Tensor:
    """Return the outputs of `x` in random ragged steps, padded to (batch, time, ...)."""
    batch, time = x.shape[:2]
    state = subject.start(batch, time, memory)
    pieces: list[list[Tensor]] = [[] for _ in range(batch)]
    for taken in ragged_steps(lengths, max_step):
        width = int(taken.max()) + int(torch.randint(0, 2, ()))  # sometimes with one column of padding
        at = (state.lengths[:, None] + torch.arange(width)).clamp(max=time - 1)
        valid = torch.arange(width)[None] < taken[:, None]
        columns = torch.gather(x, 1, at.view(*at.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))
        y, state = subject.step(columns, state, valid)
        for row in range(batch):
            pieces[row].append(y[row, : int(taken[row])])
    rows = [torch.cat(row) for row in pieces]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _ragged(batch: int, time: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(1, time + 1, (batch,))
    lengths[0] = time
    return lengths, torch.arange(time)[None] < lengths[:, None]


def cuts(subject: Subject, time: int = 23, batch: int = 4, max_step: int = 6) -> Finding:
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    lengths, valid = _ragged(batch, time)
    with torch.no_grad():
        whole = subject.forward(x, valid, memory)
        worst = 0.0
        for largest in (1, max_step, time):
            subject.fused = largest != max_step
            steps = in_random_steps(subject, x, lengths, memory, largest)
            worst = max(worst, max_difference(steps[valid], whole[valid]))
    subject.fused = True
    return Finding("cuts", worst, LIMIT, f"{batch} rows of up to {time} positions in random steps")


LONG = 420  # positions, more than any window, block or segment of a recipe of size tiny


def _limit_length(subject: Subject, time: int) -> int:
    return min(time, getattr(subject.module, "limit", None) or time)


def long(subject: Subject, time: int = LONG, batch: int = 2) -> Finding:
    """Check, with kernels (if there are any) and without, few long steps, some of medium length, then single ones."""
    time = _limit_length(subject, time)
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    lengths = torch.tensor([time, *torch.randint(time // 2, time, (batch - 1,)).tolist()])
    valid = torch.arange(time)[None] < lengths[:, None]
    worst = 0.0
    with torch.no_grad():
        whole, unpadded = subject.forward(x, valid, memory), subject.forward(x, None, memory)
        for switch in (disabled,) if why_no_kernels(whole) else (nullcontext, disabled):
            with switch():
                for max_step in (time, time // 3):
                    steps = in_random_steps(subject, x, lengths, memory, max_step)
                    worst = max(worst, max_difference(steps[valid], whole[valid]))
                worst = max(worst, max_difference(_long_then_single(subject, x, memory), unpadded))
    return Finding("long", worst, LIMIT, f"{batch} rows of up to {time} positions, with kernels and without")


def _long_then_single(subject: Subject, x: Tensor, memory: Memory | None, single: int = 70) -> Tensor:
    """Return the outputs of two long steps, and of single ones after them."""
    time = x.shape[1]
    first = max((time - single) // 4, 1)
    cuts_at = [0, first, max(time - single, first + 1), *range(max(time - single, first + 1) + 1, time + 1)]
    state, outputs = subject.start(len(x), time, memory), []
    for begin, end in pairwise(cuts_at):
        y, state = subject.step(x[:, begin:end], state, None)
        outputs.append(y)
    return torch.cat(outputs, 1)


def branches(subject: Subject, time: int = LONG, batch: int = 3) -> Finding:
    """Step from a state S to S1 and to S2, then on from S1, from S2 and from S again, also after many later steps. A
    state that can no longer be continued must be refused, never wrong."""
    time = _limit_length(subject, time)
    x, worst, refused = subject.inputs(batch, time), 0.0, 0
    with torch.no_grad():
        memory = subject.memory(batch)
    rows, cut = torch.arange(batch), torch.tensor([time // 4 - 3 * row for row in range(batch)])

    def expected(read: list[Tensor], new: Tensor) -> Tensor:
        """Return the outputs of `new` (batch, n) after what each row has read, in one forward pass."""
        ends = torch.tensor([len(own) for own in read])[:, None] + torch.arange(new.shape[1])
        all_read = [torch.cat((old, own)) for old, own in zip(read, new, strict=True)]
        x = nn.utils.rnn.pad_sequence(all_read, batch_first=True)
        valid = torch.arange(x.shape[1])[None] <= ends[:, -1:]
        return subject.forward(x, valid, memory)[rows[:, None], ends]

    def after(state: State, new: Tensor) -> State:
        """Take one step for all rows, and compare it with the forward pass over everything that each row has read."""
        nonlocal worst
        y, following = subject.step(new, state, None)
        worst = max(worst, max_difference(y, expected(read[id(state)], new)))
        read[id(following)] = [torch.cat((old, own)) for old, own in zip(read[id(state)], new, strict=True)]
        alive.append(following)
        return following

    with torch.no_grad():
        valid = torch.arange(int(cut.max()))[None] < cut[:, None]
        alive, read = [], {}
        begun = [x[row, : int(cut[row])] for row in rows]
        for _ in range(4):
            _, base = subject.step(x[:, : int(cut.max())], subject.start(batch, time, memory), valid)
            read[id(base)] = begun
            alive.append(base)
        space, new = time - int(cut.max()) - 9, subject.inputs(batch, 1)
        next_output = expected(begun, new)
        for state, far, single in (
            (alive[0], min(40, space), False),
            (alive[1], min(60, space), True),
            (alive[2], space, False),
        ):
            following = state
            for _ in range(far if single else 1):  # any single step may start a new chunk
                _, following = subject.step(subject.inputs(batch, 1 if single else far), following, None)
            for again in (state, *_copies(state)):  # copies have lost the same positions
                try:
                    y, following = subject.step(new, again, None)
                except UserError:
                    refused += 1
                    continue
                alive.append(following)
                worst = max(worst, max_difference(y, next_output))
        one = after(base, subject.inputs(batch, 5))
        two = after(base, subject.inputs(batch, 1))
        three = after(two, subject.inputs(batch, 1))
        for state in (one, two, three, base, one):
            after(state, subject.inputs(batch, 1))
    return Finding("branches", worst, LIMIT, f"several continuations of one state, {refused} of them refused")


def _copies(state: State) -> Iterator[State]:
    """Yield copies of the state made in every supported way."""
    rows = torch.arange(len(state.lengths))
    yield state.copy()
    yield copy.deepcopy(state)
    yield pickle.loads(pickle.dumps(state))
    yield select(select(state, rows.flip(0)), rows.flip(0))
    yield join([select(state, rows[:1]), select(state, rows[1:])])


def capacity(subject: Subject, time: int = 90, batch: int = 2) -> Finding:
    time = _limit_length(subject, time)
    x, memory, worst = subject.inputs(batch, time), subject.memory(batch), 0.0
    with torch.no_grad():
        whole = subject.forward(x, None, memory)
        for initial in (0, 1, 7):
            state, begin = subject.start(batch, initial, memory), 0
            for count in (1, 0, 2, 9, 1, 1, 0, time - 14):
                y, state = subject.step(x[:, begin : begin + count], state, None)
                worst = max(worst, max_difference(y, whole[:, begin : begin + count]))
                if y.shape != (batch, count, *whole.shape[2:]):
                    worst = float("inf")
                begin += count
    return Finding("capacity", worst, LIMIT, "states that were started for fewer positions, and empty steps")


def drops(subject: Subject, batch: int = 2) -> Finding:
    """Check that single steps differ between seeds in training mode, and do not in eval mode."""
    module = subject.module
    rates = [(m, "rate") for m in module.modules() if isinstance(m, Dropout)]
    rates += [(m, "dropout") for m in module.modules() if isinstance(m, Attend)]
    before = [getattr(m, name) for m, name in rates]
    within = set(module.stack.modules())  # type: ignore[union-attr]
    x, memory = subject.inputs(batch, 6), subject.memory(batch)
    found = []
    try:
        for (m, name), rate in zip(rates, before, strict=True):
            setattr(m, name, 0.5 if rate and m in within else 0.0)
        for training in (True, False):
            module.train(training)
            outputs = []
            for seed in (1, 2):
                torch.manual_seed(seed)
                with torch.no_grad():
                    _, state = subject.step(x[:, :4], subject.start(batch, 6, memory), None)
                    state = State.of_new_buffers(state.lengths, map_tensors(state.layers, torch.zeros_like))
                    outputs.append(subject.step(x[:, 4:5], state, None)[0])
            found.append(max_difference(*outputs))
    finally:
        module.eval()
        for (m, name), rate in zip(rates, before, strict=True):
            setattr(m, name, rate)
    expected = any(rate for (m, _), rate in zip(rates, before, strict=True) if m in within)
    right = found[1] == 0 and (found[0] > 1e-3 or not expected)
    return Finding("dropout", 0.0 if right else float("inf"), LIMIT, "single steps in training mode")


def alone(subject: Subject, time: int = 13, batch: int = 4) -> Finding:
    """Check that padding changes nothing, whatever its values."""
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    lengths, valid = _ragged(batch, time)
    worst = 0.0
    with torch.no_grad():
        if not subject.is_model:
            x = torch.where(valid[..., None], x, 1e3 * torch.randn_like(x))
        whole = subject.forward(x, valid, memory)
        for row, length in enumerate(lengths.tolist()):
            one = torch.tensor([row])
            y = subject.forward(x[one, :length], None, select_memory(memory, one))[0]
            worst = max(worst, max_difference(whole[row] if y.dim() < 2 or pools(subject) else whole[row, :length], y))
    return Finding("alone", worst, LIMIT, "a padded row gives what it gives alone")


def pools(subject: Subject) -> bool:
    return subject.is_model and bool(subject.module.head.pools)  # type: ignore[union-attr]


def causal(subject: Subject, time: int = 13, batch: int = 2) -> Finding:
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    worst = 0.0
    with torch.no_grad():
        before = subject.forward(x, None, memory)
        for cut in (1, time // 2, time - 1):
            changed = torch.cat((x[:, :cut], subject.inputs(batch, time - cut)), 1)
            worst = max(worst, max_difference(subject.forward(changed, None, memory)[:, :cut], before[:, :cut]))
    return Finding("causal", worst, LIMIT, "changing later inputs changes nothing")


def selects(subject: Subject, time: int = 11, batch: int = 4) -> Finding:
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    rows = torch.tensor([2, 0, 2, 3, 1, 1])
    cut = time // 2
    with torch.no_grad():
        _, state = subject.step(x[:, :cut], subject.start(batch, time, memory), None)
        picked, _ = subject.step(x[rows, cut:], select(state, rows), None)
        direct = subject.forward(x[rows], None, select_memory(memory, rows))[:, cut:]
    return Finding("select", max_difference(picked, direct), LIMIT, "rows selected between steps, some twice")


def reorders(subject: Subject, batch: int = 4) -> Finding:
    """Check what beam search relies on: rows are reordered, duplicated and dropped after every position."""
    begun, memory, worst = subject.inputs(batch, 3), subject.memory(batch), 0.0
    sources = torch.arange(batch)
    with torch.no_grad():
        _, state = subject.step(begun, subject.start(batch, 10, memory), None)
        for count, columns in ((6, 1), (6, 1), (5, 1), (5, 2), (4, 1), (2, 1)):
            rows = torch.randint(len(begun), (count,))
            sources, new = sources[rows], subject.inputs(count, columns)
            begun = torch.cat((begun[rows], new), 1)
            y, state = subject.step(new, subject.reorder(state, rows), None)
            direct = subject.forward(begun, None, select_memory(memory, sources))[:, -columns:]
            worst = max(worst, max_difference(y, direct))
    return Finding("reorder", worst, LIMIT, "rows that are reordered after every step")


def joins(subject: Subject, time: int = 11) -> Finding:
    """Check what continuous batching relies on: rows at different positions, with sources of their own, continue in one
    batch."""
    worst, parts, usual = 0.0, [], subject.source
    with torch.no_grad():
        for rows, cut, source in ((2, time // 2, usual), (1, 1, usual - 3), (2, time - 3, usual - 1)):
            subject.source = source
            x, memory = subject.inputs(rows, time), subject.memory(rows)
            _, state = subject.step(x[:, :cut], subject.start(rows, cut + 3, memory), None)
            parts.append((x, subject.forward(x, None, memory), state, cut))
        subject.source = usual
        state = join([part[2] for part in parts])
        for window in (slice(0, 1), slice(1, 3)):
            x, direct = (
                torch.cat([part[which][:, part[3] + window.start : part[3] + window.stop] for part in parts])
                for which in (0, 1)
            )
            y, state = subject.step(x, state, None)
            worst = max(worst, max_difference(y, direct))
    return Finding("join", worst, LIMIT, "rows of several batches, at different positions, joined")


def again(subject: Subject, time: int = 19, batch: int = 4) -> Finding:
    """Check what speculative decoding relies on: the state before a step is still valid after it."""
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    cut, worst = time // 2, 0.0
    with torch.no_grad():
        direct = subject.forward(x, None, memory)[:, cut:]
        for taken in (1, 5, time - cut):
            _, state = subject.step(x[:, :cut], subject.start(batch, time, memory), None)
            subject.step(subject.inputs(batch, taken), state, None)
            y, _ = subject.step(x[:, cut:], state, None)
            worst = max(worst, max_difference(y, direct))
    return Finding("again", worst, LIMIT, "a step from an older state")


def gradients(subject: Subject, time: int = 9, batch: int = 3, max_steps: Sequence[int] = (4, 9)) -> Finding:
    """Compare the gradients of parameters and of a mixer's input through steps, if it streams, and through the forward
    pass.

    max_steps: the maximum step size of each way to cut the sequence.
    """
    module = subject.module
    x = subject.inputs(batch, time)
    leaves = [*module.parameters()] if subject.is_model else [x.requires_grad_(), *module.parameters()]
    lengths, valid = _ragged(batch, time)
    cotangent: Tensor | None = None

    def run(outputs: Callable[[Memory | None], Tensor]) -> list[Tensor]:
        nonlocal cotangent
        torch.manual_seed(7)
        for leaf in leaves:
            leaf.grad = None
        y = outputs(subject.memory(batch))
        if not pools(subject):
            y = y[valid]
        cotangent = torch.randn_like(y) if cotangent is None else cotangent
        (y * cotangent).sum().backward()
        return [leaf.grad.clone() if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]

    whole = run(lambda memory: subject.forward(x, valid, memory))
    worst = max((0.0 if bool(torch.isfinite(g).all()) else float("inf") for g in whole), default=0.0)
    if subject.streams:
        for max_step in max_steps:
            steps = run(lambda memory, max_step=max_step: in_random_steps(subject, x, lengths, memory, max_step))
            worst = max([worst, *(max_difference(a, b) for a, b in zip(steps, whole, strict=True))])
    module.zero_grad()
    return Finding("gradients", worst, LIMIT * 10, "finite" + (", and equal through steps" if subject.streams else ""))


def long_gradients(subject: Subject) -> Finding:
    """Compare gradients through few long steps; and through single ones with frozen embeddings, so that no input
    requires a gradient, and with only the queries trainable."""
    time = _limit_length(subject, 200)
    found = gradients(subject, time, 2, (max(time // 4, 1), time))
    embeds = [m for m in subject.module.modules() if isinstance(m, Embed)]
    learning = [p for p in subject.module.parameters() if p.requires_grad]
    frozen = {p for embed in embeds for p in embed.parameters()}
    queries = {p for name, p in subject.module.named_parameters() if name.endswith("q.weight")}
    worst = found.worst
    for chosen in (set(learning) - frozen, queries or set(learning)):
        for parameter in learning:
            parameter.requires_grad_(parameter in chosen)
        worst = max(worst, _single_gradients(subject).worst)
    for parameter in learning:
        parameter.requires_grad_(True)
    return Finding("backward", worst, found.limit, "through long steps, and single ones with frozen parameters")


def _single_gradients(subject: Subject, time: int = 5, batch: int = 2) -> Finding:
    x, leaves = subject.inputs(batch, time), [p for p in subject.module.parameters() if p.requires_grad]

    def run(single: bool) -> list[Tensor]:
        torch.manual_seed(7)
        memory = subject.memory(batch)
        if single:
            state, outputs = subject.start(batch, time, memory), []
            for at in range(time):
                y, state = subject.step(x[:, at : at + 1], state, None)
                outputs.append(y)
            y = torch.cat(outputs, 1)
        else:
            y = subject.forward(x, None, memory)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        found = torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]

    worst = max(max_difference(a, b) for a, b in zip(run(True), run(False), strict=True))
    return Finding("gradients", worst, LIMIT * 10)


def count_flops(module: nn.Module, run: Callable[[], Any]) -> float:
    """Count the flops of matrix products in `run`; those of attention only for the pairs that its pattern allows."""
    masked_flops = 0.0
    before = score_flops = 0
    hooks = []
    with FlopCounterMode(display=False) as counter:

        def enter(*_: Any) -> None:
            nonlocal before
            before = counter.get_total_flops()

        def leave(*_: Any) -> None:
            nonlocal score_flops
            score_flops = counter.get_total_flops() - before

        def attended(attend: nn.Module, _: Any, y: Tensor) -> None:
            nonlocal masked_flops
            weights = latest.pop()
            idle = 1 - float((weights > 0).sum()) / weights.numel()
            masked_flops += idle * (score_flops + 2 * weights.numel() * y.shape[-1])

        latest: list[Tensor] = []
        for part in module.modules():
            if isinstance(part, Score):
                hooks += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
            elif isinstance(part, Attend):
                part.weights.watchers.append(lambda w: latest.append(w))
                hooks.append(part.register_forward_hook(attended))
        run()
    for hook in hooks:
        hook.remove()
    for part in module.modules():
        if isinstance(part, Attend):
            part.weights.watchers.clear()
    return counter.get_total_flops() - masked_flops


def costs(subject: Subject, length: int = 5, past: int = 8) -> Finding:
    """Check the flops of a step after others, and the bytes of the state after it."""
    module = subject.module
    subject.source = past + length
    x = subject.inputs(1, past + length)
    with torch.no_grad():
        memory = subject.memory(1)
        if subject.streams:
            state = subject.start(1, past + length, memory)
            state_size = state_bytes(state.layers)
            if past:
                _, state = subject.step(x[:, :past], state, None)
            counted = count_flops(module, lambda: subject.step(x[:, past:], state, None))
            declared = module.cost(length, past)
        else:
            state_size, declared = 0, module.cost(past + length)
            subject.forward(x, None, memory)  # fills caches that depend only on the weights
            counted = count_flops(module, lambda: subject.forward(x, None, memory))
            if memory is not None:  # keys and values of the memory are made once, at the start
                begin = Context.begin(1, 0, memory=memory)
                crossing = [m for m in module.modules() if getattr(m, "over", "") == "memory"]
                counted -= count_flops(module, lambda: [m.start(begin, 0) for m in crossing])  # type: ignore[operator]
    worst = abs(declared.flops - counted) / max(counted, 1.0)
    if subject.streams:
        worst = max(worst, abs(declared.state - state_size) / max(state_size, 1))
    detail = f"{declared.flops} flops declared, {counted:.0f} counted; "
    detail += f"{declared.state} bytes declared, {state_size} counted"
    return Finding("cost", worst, 1e-6, detail)


def laws_for(subject: Subject) -> dict[str, Callable[[Subject], Finding]]:
    """Return the laws that apply to the subject, by name."""
    from . import canvases, edits

    stepping = {"cuts": cuts, "causal": causal, "select": selects, "reorder": reorders, "join": joins, "again": again}
    if subject.is_model:  # slow checks that would repeat themselves for every mixer
        stepping |= {"long": long, "branches": branches, "capacity": capacity, "dropout": drops}
        stepping |= {"backward": long_gradients, "edited": edits.edited}
    writes_at_once = isinstance(subject.module, Model) and subject.module.length is not None
    parallel = {"batches": canvases.batches} if writes_at_once else {}
    return {
        **(stepping if subject.streams else parallel), "alone": alone, "gradients": gradients, "cost": costs,
    }  # fmt: skip


def check(module: Mixer | Model | Towers, seed: int = 0, without: Collection[str] = ()) -> list[Finding]:
    """Check all laws that apply to a module, except those named in `without`."""
    findings = []
    for subject, laws in subjects(module):
        for name, law in laws.items():
            if name in without:
                continue
            torch.manual_seed(seed)
            findings.append(law(subject)._replace(law=name))
            subject.source = 7
    return findings


def subjects(module: Mixer | Model | Towers) -> Iterator[tuple[Subject, dict[str, Callable[[Subject], Finding]]]]:
    """Yield each subject of a module and its laws by name. Each of two towers is a subject by itself."""
    for side, one in {"": module}.items() if isinstance(module, Mixer) else models_in(module).items():
        subject = Subject(one)
        yield subject, {f"{side} {name}".strip(): law for name, law in laws_for(subject).items()}
