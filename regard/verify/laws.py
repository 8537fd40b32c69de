"""The laws, as checks that run on anything: a mixer, a recipe, a part of your own.

    cuts       however a sequence is cut into steps, the output is the same, rows of a batch at different places
    alone      a row of a padded batch gives what it gives alone
    causal     changing the future changes nothing
    select     choosing rows and stepping is stepping and choosing rows
    join       rows of several batches go on together as they would have alone
    again      a step that is taken back leaves no trace
    long       the same as cuts beyond every window, block, segment and eviction, in few long steps and many short ones
    branches   from one state several others go on, and each is right whatever the others do; or it is refused
    capacity   a state that was started for fewer positions grows, and a step of nothing is nothing
    dropout    a step in training mode drops what the whole would
    edited     whatever is done to the modules and weights of a model, before or while it decodes, counts at once
    gradients  finite, and the same through steps as through the whole
    backward   the same through long steps, and through single ones where embeddings are frozen
    cost       flops and state bytes equal what is counted

They run in float64, where a true equality is 1e-9 or better and a mistake of one position is not.
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
from regard.ops.dispatch import disabled

LIMIT = 1e-9


class Finding(NamedTuple):
    """What a check saw."""

    law: str
    worst: float  # largest difference, relative to the size of what is compared where that is above 1
    limit: float
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.worst <= self.limit


class Subject:
    """A mixer or a model behind one face: inputs (batch, time, ...), whole, start, step. fused: a model steps through
    a decoding session, else by its own `step`."""

    fused = True

    def __init__(self, module: Mixer | Model, source: int = 7):
        self.module = module.double().eval()
        self.source = source
        self.is_model = isinstance(module, Model)
        self.session = Session(module) if isinstance(module, Model) else None  # takes the steps, fused where it can

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
        """A ragged one, where the subject looks at one."""
        lengths = torch.randint(1, self.source + 1, (batch,))
        lengths[0] = self.source
        valid = torch.arange(self.source)[None] < lengths[:, None]
        if not self.is_model:
            place = getattr(self.module, "memory_width", self.module.width)
            x = torch.randn(batch, self.source, place, dtype=torch.float64)  # type: ignore[arg-type]
            return Memory(x, valid, layer_outputs=(x,))
        if self.module.encoder is None:  # type: ignore[union-attr]
            return None
        source = self.module.source_embed.random_input(batch, self.source)  # type: ignore[operator,union-attr]
        return self.module.encode(source, valid)  # type: ignore[operator,union-attr]

    def whole(self, x: Tensor, valid: Tensor | None, memory: Memory | None) -> Tensor:
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
        return State.of_new_buffers(state.lengths[rows], self.module.reorder(state.layers, rows))  # type: ignore[operator,union-attr]


def differ(one: Tensor, two: Tensor) -> float:
    """The largest difference, relative where numbers are large; NaN counts as infinitely far."""
    if one.numel() == 0:
        return 0.0
    gap = (one - two).abs() / two.abs().clamp(min=1)
    return float("inf") if not bool(torch.isfinite(gap).all()) else float(gap.max())


def rows_of(memory: Memory | None, rows: Tensor) -> Memory | None:
    return None if memory is None else select(memory, rows)


def ragged_steps(lengths: Tensor, most: int) -> Iterator[Tensor]:
    """(batch,) counts of columns that each row takes in the next step, until all rows are used up."""
    left = lengths.clone()
    while bool((left > 0).any()):
        widest = int(torch.randint(1, most + 1, ()))
        taken = torch.minimum(torch.randint(0, widest + 1, left.shape), left)
        if bool((taken > 0).any()):
            yield taken
            left = left - taken


def stepwise(subject: Subject, x: Tensor, lengths: Tensor, memory: Memory | None, most: int) -> Tensor:
    """The outputs of `x` taken in random ragged steps, laid out as in the whole; nothing where there is no input."""
    batch, time = x.shape[:2]
    state = subject.start(batch, time, memory)
    pieces: list[list[Tensor]] = [[] for _ in range(batch)]
    for taken in ragged_steps(lengths, most):
        width = int(taken.max()) + int(torch.randint(0, 2, ()))  # at times one column that is real in no row
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


def cuts(subject: Subject, time: int = 23, batch: int = 4, most: int = 6) -> Finding:
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    lengths, valid = _ragged(batch, time)
    with torch.no_grad():
        whole = subject.whole(x, valid, memory)
        worst = 0.0
        for largest in (1, most, time):
            subject.fused = largest != most
            steps = stepwise(subject, x, lengths, memory, largest)
            worst = max(worst, differ(steps[valid], whole[valid]))
    subject.fused = True
    return Finding("cuts", worst, LIMIT, f"{batch} rows of up to {time} positions in random steps")


LONG = 420  # positions: beyond what any recipe of size tiny keeps, blocks or counts by


def _reach(subject: Subject, time: int) -> int:
    return min(time, getattr(subject.module, "limit", None) or time)


def long(subject: Subject, time: int = LONG, batch: int = 3) -> Finding:
    """With kernels and without, rows at different places: few long steps, some of middle length, then single ones."""
    time = _reach(subject, time)
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    lengths = torch.tensor([time, *torch.randint(time // 2, time, (batch - 1,)).tolist()])
    valid = torch.arange(time)[None] < lengths[:, None]
    worst = 0.0
    with torch.no_grad():
        whole = subject.whole(x, valid, memory)
        for switch in (nullcontext, disabled):
            with switch():
                for most in (time, time // 3):
                    steps = stepwise(subject, x, lengths, memory, most)
                    worst = max(worst, differ(steps[valid], whole[valid]))
                worst = max(worst, differ(_then_single(subject, x, memory), subject.whole(x, None, memory)))
    return Finding("long", worst, LIMIT, f"{batch} rows of up to {time} positions, with kernels and without")


def _then_single(subject: Subject, x: Tensor, memory: Memory | None, single: int = 70) -> Tensor:
    """The outputs of two long steps, and of single ones after them."""
    time = x.shape[1]
    first = max((time - single) // 4, 1)
    cuts_at = [0, first, max(time - single, first + 1), *range(max(time - single, first + 1) + 1, time + 1)]
    state, outputs = subject.start(len(x), time, memory), []
    for begin, end in pairwise(cuts_at):
        y, state = subject.step(x[:, begin:end], state, None)
        outputs.append(y)
    return torch.cat(outputs, 1)


def branches(subject: Subject, time: int = LONG, batch: int = 3) -> Finding:
    """From a state S to S1 and to S2, on with S1, with S2 and with S again, and back from far beyond. Rows stand at
    different places. What cannot be gone back to is refused, never wrong."""
    time = _reach(subject, time)
    x, worst, refused = subject.inputs(batch, time), 0.0, 0
    with torch.no_grad():
        memory = subject.memory(batch)
    rows, cut = torch.arange(batch), torch.tensor([time // 4 - 3 * row for row in range(batch)])

    def after(state: State, new: Tensor) -> tuple[Tensor, State]:
        """One step for all rows, and how far it is from the whole of what each row has then read."""
        nonlocal worst
        y, following = subject.step(new, state, None)
        read[id(following)] = [torch.cat((old, own)) for old, own in zip(read[id(state)], new, strict=True)]
        alive.append(following)
        for row in rows.tolist():
            whole = subject.whole(read[id(following)][row][None], None, rows_of(memory, rows[row : row + 1]))
            worst = max(worst, differ(y[row], whole[0, -new.shape[1] :]))
        return y, following

    with torch.no_grad():
        valid = torch.arange(int(cut.max()))[None] < cut[:, None]
        alive, read = [], {}
        for _ in range(4):
            _, base = subject.step(x[:, : int(cut.max())], subject.start(batch, time, memory), valid)
            read[id(base)] = [x[row, : int(cut[row])] for row in rows]
            alive.append(base)
        room = time - int(cut.max()) - 9
        for state, far, single in (
            (alive[0], min(40, room), False),
            (alive[1], min(60, room), True),
            (alive[2], room, False),
        ):
            following = state
            for _ in range(far if single else 1):  # a chunk may begin with any single step
                _, following = subject.step(subject.inputs(batch, 1 if single else far), following, None)
            for again in (state, *_copies(state)):  # which have lost what it has lost
                read[id(again)] = read[id(state)]
                alive.append(again)
                try:
                    after(again, subject.inputs(batch, 1))
                except UserError:
                    refused += 1
        _, one = after(base, subject.inputs(batch, 5))
        _, two = after(base, subject.inputs(batch, 1))
        _, three = after(two, subject.inputs(batch, 1))
        for state in (one, two, three, base, one):
            after(state, subject.inputs(batch, 1))
    return Finding("branches", worst, LIMIT, f"several ways on from one state, {refused} of them refused")


def _copies(state: State) -> Iterator[State]:
    """The same state by every way to copy one."""
    rows = torch.arange(len(state.lengths))
    yield state.copy()
    yield copy.deepcopy(state)
    yield pickle.loads(pickle.dumps(state))
    yield select(select(state, rows.flip(0)), rows.flip(0))
    yield join([select(state, rows[:1]), select(state, rows[1:])])


def capacity(subject: Subject, time: int = 90, batch: int = 2) -> Finding:
    time = _reach(subject, time)
    x, memory, worst = subject.inputs(batch, time), subject.memory(batch), 0.0
    with torch.no_grad():
        whole = subject.whole(x, None, memory)
        for room in (0, 1, 7):
            state, begin = subject.start(batch, room, memory), 0
            for count in (1, 0, 2, 9, 1, 1, 0, time - 14):
                y, state = subject.step(x[:, begin : begin + count], state, None)
                worst = max(worst, differ(y, whole[:, begin : begin + count]))
                if y.shape != (batch, count, *whole.shape[2:]):
                    worst = float("inf")
                begin += count
    return Finding("capacity", worst, LIMIT, "states that were started for fewer positions, and steps of nothing")


def drops(subject: Subject, batch: int = 2) -> Finding:
    """In training mode, without gradients, single steps differ from draw to draw; in eval mode they do not."""
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
            found.append(differ(*outputs))
    finally:
        module.eval()
        for (m, name), rate in zip(rates, before, strict=True):
            setattr(m, name, rate)
    expected = any(rate for (m, _), rate in zip(rates, before, strict=True) if m in within)
    right = found[1] == 0 and (found[0] > 1e-3 or not expected)
    return Finding("dropout", 0.0 if right else float("inf"), LIMIT, "single steps in training mode")


def alone(subject: Subject, time: int = 13, batch: int = 4) -> Finding:
    """Padding changes nothing, whatever stands in it."""
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    lengths, valid = _ragged(batch, time)
    worst = 0.0
    with torch.no_grad():
        if not subject.is_model:
            x = torch.where(valid[..., None], x, 1e3 * torch.randn_like(x))
        whole = subject.whole(x, valid, memory)
        for row, length in enumerate(lengths.tolist()):
            one = torch.tensor([row])
            y = subject.whole(x[one, :length], None, rows_of(memory, one))[0]
            worst = max(worst, differ(whole[row] if y.dim() < 2 or subject_pools(subject) else whole[row, :length], y))
    return Finding("alone", worst, LIMIT, "a padded row gives what it gives alone")


def subject_pools(subject: Subject) -> bool:
    return subject.is_model and bool(subject.module.head.pools)  # type: ignore[union-attr]


def causal(subject: Subject, time: int = 13, batch: int = 2) -> Finding:
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    worst = 0.0
    with torch.no_grad():
        before = subject.whole(x, None, memory)
        for cut in (1, time // 2, time - 1):
            changed = torch.cat((x[:, :cut], subject.inputs(batch, time - cut)), 1)
            worst = max(worst, differ(subject.whole(changed, None, memory)[:, :cut], before[:, :cut]))
    return Finding("causal", worst, LIMIT, "changing the future changes nothing")


def selects(subject: Subject, time: int = 11, batch: int = 4) -> Finding:
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    rows = torch.tensor([2, 0, 2, 3, 1, 1])
    cut = time // 2
    with torch.no_grad():
        _, state = subject.step(x[:, :cut], subject.start(batch, time, memory), None)
        picked, _ = subject.step(x[rows, cut:], select(state, rows), None)
        direct = subject.whole(x[rows], None, rows_of(memory, rows))[:, cut:]
    return Finding("select", differ(picked, direct), LIMIT, "rows chosen between steps, some twice")


def reorders(subject: Subject, batch: int = 4) -> Finding:
    """What beam search relies on: rows change places after every position, some are doubled and some leave."""
    begun, memory, worst = subject.inputs(batch, 3), subject.memory(batch), 0.0
    sources = torch.arange(batch)
    with torch.no_grad():
        _, state = subject.step(begun, subject.start(batch, 10, memory), None)
        for many, columns in ((6, 1), (6, 1), (5, 1), (5, 2), (4, 1), (2, 1)):
            rows = torch.randint(len(begun), (many,))
            sources, new = sources[rows], subject.inputs(many, columns)
            begun = torch.cat((begun[rows], new), 1)
            y, state = subject.step(new, subject.reorder(state, rows), None)
            direct = subject.whole(begun, None, rows_of(memory, sources))[:, -columns:]
            worst = max(worst, differ(y, direct))
    return Finding("reorder", worst, LIMIT, "rows that change places after every step")


def joins(subject: Subject, time: int = 11) -> Finding:
    """What a sentence that enters a batch relies on: rows at different places, with sources of their own, go on
    together."""
    worst, parts, usual = 0.0, [], subject.source
    with torch.no_grad():
        for rows, cut, source in ((2, time // 2, usual), (1, 1, usual - 3), (2, time - 3, usual - 1)):
            subject.source = source
            x, memory = subject.inputs(rows, time), subject.memory(rows)
            _, state = subject.step(x[:, :cut], subject.start(rows, cut + 3, memory), None)
            parts.append((x, subject.whole(x, None, memory), state, cut))
        subject.source = usual
        state = join([part[2] for part in parts])
        for ahead in (slice(0, 1), slice(1, 3)):
            x, direct = (
                torch.cat([part[which][:, part[3] + ahead.start : part[3] + ahead.stop] for part in parts])
                for which in (0, 1)
            )
            y, state = subject.step(x, state, None)
            worst = max(worst, differ(y, direct))
    return Finding("join", worst, LIMIT, "rows of several batches, at different places, made one")


def again(subject: Subject, time: int = 19, batch: int = 4) -> Finding:
    """What a draft that is turned down relies on: the state before a step is still good after it."""
    x, memory = subject.inputs(batch, time), subject.memory(batch)
    cut, worst = time // 2, 0.0
    with torch.no_grad():
        direct = subject.whole(x, None, memory)[:, cut:]
        for taken in (1, 5, time - cut):
            _, state = subject.step(x[:, :cut], subject.start(batch, time, memory), None)
            subject.step(subject.inputs(batch, taken), state, None)
            y, _ = subject.step(x[:, cut:], state, None)
            worst = max(worst, differ(y, direct))
    return Finding("again", worst, LIMIT, "a step that is taken back leaves no trace")


def gradients(subject: Subject, time: int = 9, batch: int = 3, longest: Sequence[int] = (4, 9)) -> Finding:
    """Compare the gradients of parameters and of a mixer's input through steps, where there are any, and the whole.

    longest: the columns of a step, at the most, for each way to cut the sequence.
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
        if not subject_pools(subject):
            y = y[valid]
        cotangent = torch.randn_like(y) if cotangent is None else cotangent
        (y * cotangent).sum().backward()
        return [leaf.grad.clone() if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]

    whole = run(lambda memory: subject.whole(x, valid, memory))
    worst = max((0.0 if bool(torch.isfinite(g).all()) else float("inf") for g in whole), default=0.0)
    if subject.streams:
        for most in longest:
            steps = run(lambda memory, most=most: stepwise(subject, x, lengths, memory, most))
            worst = max([worst, *(differ(a, b) for a, b in zip(steps, whole, strict=True))])
    module.zero_grad()
    return Finding("gradients", worst, LIMIT * 10, "finite" + (", and equal through steps" if subject.streams else ""))


def long_gradients(subject: Subject) -> Finding:
    """Through few long steps; and through single ones where embeddings do not learn, so that no input does, and where
    queries alone learn."""
    time = _reach(subject, 200)
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
    return Finding("backward", worst, found.limit, "through long steps, and single ones of what is partly frozen")


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
            y = subject.whole(x, None, memory)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        found = torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]

    worst = max(differ(a, b) for a, b in zip(run(True), run(False), strict=True))
    return Finding("gradients", worst, LIMIT * 10)


def count_flops(module: nn.Module, run: Callable[[], Any]) -> float:
    """Flops of matrix products in `run`; attention's are counted by the pairs that its pattern allows."""
    spared = 0.0
    before = scored = 0
    hooks = []
    with FlopCounterMode(display=False) as counter:

        def enter(*_: Any) -> None:
            nonlocal before
            before = counter.get_total_flops()

        def leave(*_: Any) -> None:
            nonlocal scored
            scored = counter.get_total_flops() - before

        def attended(attend: nn.Module, _: Any, y: Tensor) -> None:
            nonlocal spared
            weights = latest.pop()
            idle = 1 - float((weights > 0).sum()) / weights.numel()
            spared += idle * (scored + 2 * weights.numel() * y.shape[-1])

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
    return counter.get_total_flops() - spared


def costs(subject: Subject, length: int = 5, past: int = 8) -> Finding:
    """Flops of a step after others, and the bytes of the state after it."""
    module = subject.module
    subject.source = past + length
    x = subject.inputs(1, past + length)
    with torch.no_grad():
        memory = subject.memory(1)
        if subject.streams:
            state = subject.start(1, past + length, memory)
            held = state_bytes(state.layers)
            if past:
                _, state = subject.step(x[:, :past], state, None)
            counted = count_flops(module, lambda: subject.step(x[:, past:], state, None))
            said = module.cost(length, past)
        else:
            held, said = 0, module.cost(past + length)
            subject.whole(x, None, memory)  # so that what follows from the weights alone is there
            counted = count_flops(module, lambda: subject.whole(x, None, memory))
    worst = abs(said.flops - counted) / max(counted, 1.0)
    if subject.streams:
        worst = max(worst, abs(said.state - held) / max(held, 1))
    detail = f"{said.flops} flops said, {counted:.0f} counted; {said.state} bytes said, {held} held"
    return Finding("cost", worst, 1e-6, detail)


def concerning(subject: Subject) -> dict[str, Callable[[Subject], Finding]]:
    """The laws that concern it, by name."""
    from . import edits

    stepping = {"cuts": cuts, "causal": causal, "select": selects, "reorder": reorders, "join": joins, "again": again}
    if subject.is_model:  # whose states are worth more than those of its parts
        stepping |= {"long": long, "branches": branches, "capacity": capacity, "dropout": drops}
        stepping |= {"backward": long_gradients, "edited": edits.edited}
    return {**(stepping if subject.streams else {}), "alone": alone, "gradients": gradients, "cost": costs}


def check(module: Mixer | Model | Towers, seed: int = 0, without: Collection[str] = ()) -> list[Finding]:
    """Check all laws that concern it, but for those named in `without`."""
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
    """What the laws are about, and those that concern it, by name: each of two towers is a model by itself."""
    for side, one in {"": module}.items() if isinstance(module, Mixer) else models_in(module).items():
        subject = Subject(one)
        yield subject, {f"{side} {name}".strip(): law for name, law in concerning(subject).items()}
