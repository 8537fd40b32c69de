"""Multi-head attention with a key-value cache: projections, a position, a pattern, a score and a kernel."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

import torch
from torch import Tensor, nn

from regard.core import (
    Context,
    Cost,
    Growth,
    Memory,
    Mixer,
    Norm,
    Pattern,
    Place,
    Position,
    Score,
    UserError,
    part,
    select,
)
from regard.core.fusion import AttentionStep, FusedAttention
from regard.ops.attention import projected_attention
from regard.ops.dispatch import (
    NOT_PLAIN,
    SEPARATE,
    inside_touched,
    is_few_rows,
    note,
    plain_linears,
    why_no_kernels,
)
from regard.pattern.analysis import first_blind_query, pairs, slots
from regard.schema import name_of

from . import blocks
from .attend import Attend
from .attention_mask import AttentionMask
from .cache import Cache, Source, common_slot, write, written_copy
from .segments import pieces

CHUNK = 64  # a cache that drops keys is written at most this many positions at a time


class MultiHead(Mixer[Cache | Source]):
    """Multi-head attention with its cache, the base of `attention` and its variants. `parts/mixers/attention.py`
    explains the arguments."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        dim: int | None = None,
        over: str = "self",
        pattern: Pattern | str = "causal",
        position: Position | str | dict = "none",
        score: Score | str | dict = "scaled_dot",
        project: str = "qkvo",
        bias: bool | str = True,
        norm: Norm | str | dict = "none",
        qk_norm: Norm | str | dict = "none",
        weight_dropout: float = 0.0,
        kernel: str = "auto",
        place: Place | None = None,
    ):
        super().__init__()
        self.width, self.heads, self.kv_heads = width, heads, kv_heads or heads
        if dim is None and width % heads:
            raise UserError(f"width {width} is not divisible by {heads} heads: change one, or give dim")
        if heads % self.kv_heads:
            raise UserError(f"{heads} heads cannot share {kv_heads} kv_heads evenly")
        if over not in ("self", "memory"):
            raise UserError(f"over must be 'self' or 'memory', not '{over}'")
        if set(project) - set("qkvo"):
            raise UserError(f"project takes letters of 'qkvo', not '{project}'")
        self.dim = dim or width // heads
        self.over = over
        self.pattern = part(Pattern, pattern if over == "self" or pattern != "causal" else "everything")
        if self.pattern.heads > heads:
            raise UserError(f"pattern '{self.pattern}' is for {self.pattern.heads} heads, and there are {heads}")
        if self.pattern.causal and self.pattern.fixed:
            _check_not_blind(self.pattern, 1)
        self.position = attention_position(position, place, width=width, heads=heads, dim=self.dim)
        self.score = part(Score, score, dim=self.dim, heads=heads, kv_heads=self.kv_heads, width=width)
        if self.position.needs_query and not self.score.is_dot:
            raise UserError(
                f"position '{name_of(self.position)}' needs a score that is a dot product, and "
                f"'{name_of(self.score)}' is not one"
            )
        biased = {True: "qkvo", False: ""}.get(bias, bias) if isinstance(bias, bool) else bias
        memory = place.memory if over == "memory" and place and place.memory else width
        inner, shared = heads * self.dim, self.kv_heads * self.dim

        def map_to(letter: str, wide: int, to: int) -> nn.Module:
            if letter in project:
                return nn.Linear(wide, to, bias=letter in biased)
            if wide != to:
                raise UserError(f"'{letter}' is not projected, but {wide} channels come in and {to} are needed")
            return nn.Identity()

        self.q, self.k = map_to("q", width, inner), map_to("k", memory, shared)
        self.v, self.out = map_to("v", memory, shared), map_to("o", inner, width)
        self.norm = part(Norm, norm, width=inner)
        self.q_norm, self.k_norm = part(Norm, qk_norm, width=self.dim), part(Norm, qk_norm, width=self.dim)
        self.attend = Attend(kernel, weight_dropout)
        for letter in (self.q, self.k, self.v, self.out):
            if isinstance(letter, nn.Linear):
                nn.init.xavier_uniform_(letter.weight)
                if letter.bias is not None:
                    nn.init.zeros_(letter.bias)
        if isinstance(self.q, nn.Linear) and self.score.birth != 1:
            with torch.no_grad():
                self.q.weight.mul_(self.score.birth)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.over == "memory" or self.pattern.causal

    @property
    def key_dim(self) -> int:
        """Channels of a cached key."""
        return self.score.cached or self.dim

    def queries(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries (batch, heads, n, dim) for the score, and those for the position's bias, both scaled by
        the score."""
        q = self.q_norm(self.q(x).view(*x.shape[:-1], self.heads, self.dim)).transpose(1, 2)
        ready = self.score.query(self.position.query(q, at))
        return ready, self.score.query(self.position.bias_query(q)) if self.position.needs_query else ready

    def keys(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (batch, m, kv_heads, dim), ready to be cached."""
        split = (*x.shape[:-1], self.kv_heads, self.dim)
        k = self.k_norm(self.k(x).view(split)).transpose(1, 2)
        v = self.v(x).view(split).transpose(1, 2)
        return self.score.key(self.position.key(k, at)).transpose(1, 2), self.position.value(v, at).transpose(1, 2)

    def look(self, x: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, valid: Tensor | None) -> Tensor:
        return self.out(self.norm(self.read(x, keys, values, mask), valid))

    def read(self, x: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask) -> Tensor:
        """Return the output of the heads, (batch, n, heads * dim), before the output projection."""
        q, plain = self.queries(x, mask.query_at)
        y = self.attend(q, keys.transpose(1, 2), values.transpose(1, 2), mask, self.score, self.position, plain)
        return y.transpose(1, 2).flatten(-2)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if (found := self._forward_fused(x, context)) is not None:
            return found
        if self.over == "memory":
            return self._step_across(x, self.start(context, 0), context)[0]  # type: ignore[arg-type]
        mask = context.cached(("whole", self.pattern), lambda: self._whole(context))
        return self.look(x, *self.keys(x, mask.query_at), mask, context.valid)

    def _forward_fused(self, x: Tensor, context: Context) -> Tensor | None:
        """Return the same by one op with its gradient; None where it does more than that op."""
        found = self._try_fused(x, context)
        if isinstance(found, str):
            note("projected attention", found, SEPARATE)
            return None
        note("projected attention")
        return found

    def _try_fused(self, x: Tensor, context: Context) -> Tensor | str:
        """Return the output of the fused op, or why it cannot be used."""
        dropout = self.attend.dropout if self.training else 0.0
        if why := self._why_not_plain:
            return why
        if self._is_rotary:
            return "the position rotates queries and keys after they are projected"
        if not self.attend.is_default:
            return "its weights are watched, or another kernel was chosen"
        if dropout:
            return "attention weights are dropped out, and the kernel has no dropout"
        if self._position_learns and torch.is_grad_enabled():
            return "the position's bias learns, and the kernel has no gradient of it"
        if not x.numel():
            return "the input is empty"
        linears = (self.q, self.k, self.v, self.out)
        if not plain_linears(*linears):
            return NOT_PLAIN
        if is_few_rows(x) and not torch.is_grad_enabled():
            return "separate ops are faster for so few rows without gradients"
        projections = [tensor for m in linears for tensor in (m.weight, m.bias)]  # type: ignore[union-attr]
        memory = None if self.over == "self" else self._memory(context).x
        if why := why_no_kernels(x, memory, *projections):  # type: ignore[arg-type]
            return why
        if memory is not None:
            if len(memory) != len(x) or not memory.numel():
                return "rows share a memory, or it is empty"
            mask = self._across(self._sources(context)[1], context)
        else:
            mask = context.cached(("whole", self.pattern), lambda: self._whole(context))
            if blocks.is_faster(x.shape[1], x.device, mask, self.position, dropout):
                return "the pattern leaves so much out that torch is faster block by block"
        assert self.score.factor is not None
        causal = mask.causal_only and not self._biased
        added = None if causal else self._attn_mask(mask, x)
        heads = (self.heads, self.kv_heads)
        return projected_attention(x, memory, projections, heads, self.score.factor, added, causal)  # type: ignore[arg-type]

    def _whole(self, context: Context) -> AttentionMask:
        """Return the mask of a whole sequence."""
        pattern = self._pattern(context)
        at = context.positions[:1] if context.from_start else context.positions
        padded = context.valid is not None and not pattern.causal
        return AttentionMask(pattern, at, context.marked_positions if padded else at, context.from_start, padded, {})

    def start(self, context: Context, capacity: int) -> Cache | Source:
        batch, device = context.positions.shape[0], context.positions.device
        if self.over == "memory":
            memory, (at, marked, rows) = self._memory(context), self._sources(context)
            keys, values = (t.transpose(1, 2) for t in self.keys(memory.x, at))
            if not torch.is_grad_enabled():  # they are read at every step
                keys, values = keys.contiguous(), values.contiguous()
            return Source(keys, values, marked, rows)
        count = self.slots_for(capacity) + 1
        shapes = [(batch, count, self.kv_heads, dim) for dim in (self.key_dim, self.dim)]
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=device) for shape in shapes)
        at = context.cached(("empty", count), lambda: torch.full((batch, count), -1, device=device))  # layers share it
        return Cache(keys, values, at)

    def _memory(self, context: Context) -> Memory:
        if context.memory is None:
            raise UserError("attention over the memory needs an encoder, or a memory given with the batch")
        return context.memory

    def _sources(self, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        memory = self._memory(context)
        which = ("memory", memory.x.shape[1], id(memory.valid))
        return context.cached(which, lambda: _places(memory, context.positions.shape[0]))

    def slots_for(self, capacity: int) -> int:
        """Return the slots that `capacity` positions need: fewer where the pattern drops keys."""
        return slots(self.pattern, capacity, CHUNK).counts[capacity - 1] if capacity else 0

    def can_return(self, begin: int, end: int) -> bool:
        """Slots are reused once no query of a step of CHUNK positions needs their keys."""
        if self.over == "memory" or begin == 0 or end - begin <= CHUNK:
            return True
        return end <= slots(self.pattern, end, CHUNK).reused

    def step(self, x: Tensor, state: Cache | Source, context: Context) -> tuple[Tensor, Cache | Source]:
        if isinstance(state, Source):
            return self._step_across(x, state.materialize(), context)
        if not self.streams:
            raise UserError(f"pattern '{self.pattern}' looks ahead, so this attention does not step")
        state = self._with_capacity(state, context)
        if x.shape[1] <= CHUNK or context.last_position < slots(self.pattern, context.last_position + 1, CHUNK).reused:
            return self._step(x, state, context)
        outputs = []
        for piece, within in pieces(x, context, CHUNK):  # so that no key is dropped before the queries that need it
            y, state = self._step(piece, state, within)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def fused(self) -> FusedAttention | None:
        if self._why_not_plain or not self.attend.is_default:
            why = self._why_not_plain or "its weights are watched, or another kernel was chosen"
            note("fused attention", why, SEPARATE)
            return None
        k, v = (None, None) if self.over == "memory" else (self.k, self.v)
        assert self.score.factor is not None
        group = self.over, self.pattern, self.heads, self._position_key
        return FusedAttention(self.q, k, v, self.out, self.score.factor, self._fused_step, _follow, group)

    def _fused_step(self, x: Tensor, state: Cache | Source | None, context: Context) -> AttentionStep | None:
        if state is None:
            return self._fused_whole(x, context)
        if state.keys.dtype != x.dtype:  # the state of a model that was converted since
            return None
        if isinstance(state, Source):
            state = state.materialize()
            mask, slot, rotary = self._across(state.at, context), None, None
            keys, values, after = state.keys.transpose(1, 2), state.values.transpose(1, 2), state
        else:
            cache, slot, at, mask = self._placed(x, self._with_capacity(state, context), context)
            if not isinstance(slot, int):
                return None
            keys, values, after = cache.keys, cache.values, Cache(cache.keys, cache.values, at, mask.row_owner)
            rotary = self.position.rotary_tables(context, x.dtype)
        queries = x.shape[0] // mask.query_at.shape[0]
        added, count = self._attn_mask(mask, x), mask.key_at.shape[1]
        constant = slot is None and str(self.pattern) == "everything" and not self._biased
        own = mask.row_owner is None and context.pattern is None and rotary is None
        sequential = slot is not None and str(self.pattern) == "causal" and added is None and own
        return AttentionStep(
            after, keys, values, slot, count, added, mask.row_owner, queries, rotary, constant, sequential
        )

    def _fused_whole(self, x: Tensor, context: Context) -> AttentionStep | None:
        """Return the description of all positions of one sequence x (1, n, width) at once."""
        if self.over == "memory" or self._is_rotary or len(x) > 1 or context.valid is not None:
            return None
        mask, count = context.cached(("whole", self.pattern), lambda: self._whole(context)), x.shape[1]
        shape = (1, count, self.kv_heads, self.dim)
        step = self.kv_heads * self.dim  # from position to position, and so from row to row of what is projected
        keys, values = (x.new_empty(shape).as_strided(shape, (step, step, self.dim, 1)) for _ in range(2))
        return AttentionStep(None, keys, values, 0, count, self._attn_mask(mask, x), None, count)

    def _with_capacity(self, state: Cache, context: Context) -> Cache:
        needed = context.cached(("room", self.pattern), lambda: self.slots_for(context.last_position + 1))
        return state.grow(needed) if needed > state.capacity else state

    def _across(self, at: Tensor, context: Context) -> AttentionMask:
        """Return the mask of cross-attention. Rows with one source, such as the beams of a sequence, attend together,
        and layers with the same memory share the mask."""
        return context.cached(
            ("across", self.pattern, id(at)),
            lambda: AttentionMask(self.pattern, context.positions.reshape(at.shape[0], -1), at, holes=True, cache={}),
        )

    def _step_across(self, x: Tensor, state: Source, context: Context) -> tuple[Tensor, Source]:
        sources, mask = state.at.shape[0], self._across(state.at, context)
        valid = None if context.valid is None else context.valid.reshape(sources, -1)
        keys, values = state.keys.transpose(1, 2), state.values.transpose(1, 2)
        y = self.look(x.reshape(sources, -1, x.shape[2]), keys, values, mask, valid)
        return y.reshape(*x.shape[:2], -1), state

    def _placed(self, x: Tensor, state: Cache, context: Context) -> tuple[Cache, Tensor | int, Tensor, AttentionMask]:
        """Return the state, materialized unless keys of other rows can be read, and the result of `_place` for it."""
        state = state if state.row_owner is None or self._reads_shared_rows(x, context) else state.materialize()
        # Layers with the same pattern and history put their keys into the same slots.
        known = context.cached(("step", self.pattern, state.capacity), list)
        for at, row_owner, placed in known:
            if _same(at, state.at) and _same(row_owner, state.row_owner):
                return state, *placed
        placed = self._place(state, context)
        known.append((state.at, state.row_owner, placed))
        return state, *placed

    def _step(self, x: Tensor, state: Cache, context: Context) -> tuple[Tensor, Cache]:
        state, slot, at, mask = self._placed(x, state, context)
        count = mask.key_at.shape[1]
        keys, values = self.keys(x, context.positions)
        if mask.row_owner is None:
            state = Cache(write(state.keys, slot, keys), write(state.values, slot, values), at)
        else:
            write(state.keys[: len(x)], slot, keys)
            write(state.values[: len(x)], slot, values)
            state = Cache(state.keys, state.values, at, mask.row_owner)
        return self.look(x, state.keys[:, :count], state.values[:, :count], mask, context.valid), state

    @property
    def _why_not_plain(self) -> str:
        """Why queries, keys and values are not only projected, scaled and, for the first two, rotated; an empty string
        where they are."""
        if type(self).look is not MultiHead.look or type(self).step is not MultiHead.step:
            return "the mixer has a look or a step of its own"
        if not (self.norm.is_identity and self.q_norm.is_identity and self.k_norm.is_identity):
            return "there is a norm on queries and keys, or on the output of the heads"
        others = () if self._is_rotary else ("query", "key")
        if self.position.needs_query or any(self.position.acts(place) for place in ("value", "output_bias", *others)):
            return "the position does more than to rotate queries and keys or to add a bias"
        if self.score.factor is None:
            return "its score is not a scaled dot product"
        return "a module in it has a hook, or a method of its own" if inside_touched(self) else ""

    @property
    def _position_key(self) -> Hashable:
        """Return a key that is equal for positions that give the same biases and rotations: of the same class with the
        same settings. One that holds tensors or modules is equal to itself alone."""
        position = self.position
        if [*position.children(), *position.parameters(), *position.buffers()]:
            return id(position)
        return type(position), tuple(sorted((n, repr(v)) for n, v in vars(position).items() if not n.startswith("_")))

    @property
    def _position_learns(self) -> bool:
        return any(True for _ in self.position.parameters())

    @property
    def _is_rotary(self) -> bool:
        return self.over == "self" and type(self.position).rotary_tables is not Position.rotary_tables

    @property
    def _biased(self) -> bool:
        return self.position.acts("bias")

    def _attn_mask(self, mask: AttentionMask, x: Tensor) -> Tensor | None:
        if not self._biased:
            return mask.as_attn_mask(self.heads, None, x.dtype)
        bias = self.position.bias(mask.query_at[:, None, :, None], mask.key_at[:, None, None, :], x)
        return mask.as_attn_mask(self.heads, bias, x.dtype)

    def reorder(self, state: Cache | Source, rows: Tensor, shared: dict) -> Cache | Source:
        if isinstance(state, Source) or (isinstance(state, Cache) and self._can_share_rows):
            return state.reorder(rows, shared)
        return select(state, rows)

    @property
    def _can_share_rows(self) -> bool:
        """Whether our own kernel may be used, which can read keys in other rows."""
        return self.score.is_dot and not self.position.acts("output_bias") and self.attend.is_default

    def _reads_shared_rows(self, x: Tensor, context: Context) -> bool:
        """Return whether keys in other rows can be read in this step. New keys are written to the row itself, so all
        rows must write to the same slot, which no row needs any more."""
        if x.shape[1] > 1 or context.valid is not None or not self._can_share_rows:
            return False
        if torch.is_grad_enabled() or why_no_kernels(x):
            return False
        return context.cached("even", lambda: bool((context.positions == context.positions[:1]).all()))

    def _place(self, state: Cache, context: Context) -> tuple[Tensor | int, Tensor, AttentionMask]:
        """Return the slots of this step's keys, the position in each slot after it, and the mask."""
        where = slots(self.pattern, context.last_position + 1, CHUNK)
        slot = where.table.to(state.at.device)[context.positions.clamp(max=len(where.table) - 1)]
        now = context.positions
        if context.valid is not None:
            slot = torch.where(context.valid, slot, state.capacity)
            now = torch.where(context.valid, now, -1)
        here = common_slot(slot)
        at = written_copy(state.at, here, now)
        there = at[:, : where.counts[max(context.last_position, 0)]]
        row_owner = state.row_owner
        if row_owner is not None:
            row_owner = written_copy(row_owner, here, torch.arange(len(row_owner), device=row_owner.device)[:, None])
        return (
            here,
            at,
            AttentionMask(self._pattern(context), context.positions, there, holes=True, cache={}, row_owner=row_owner),
        )

    def _pattern(self, context: Context) -> Pattern:
        """Return its own pattern and the batch's, after checking that every query has a key."""
        pattern = self.pattern if context.pattern is None else self.pattern & context.pattern
        batch = context.positions.shape[0]
        if pattern.rows not in (1, batch):
            raise UserError(f"pattern '{pattern}' is for {pattern.rows} sequences, and the batch has {batch}")
        if context.from_start:
            _check_not_blind(pattern, context.positions.shape[1], context.valid)
        elif pattern.fixed:
            _check_not_blind(pattern, context.last_position + 1)
        return pattern

    def cost(self, length: int, past: int = 0) -> Cost:
        """Return the cost; in cross-attention the memory is assumed to be as long as the sequence."""
        size = self.dtype.itemsize
        maps = (self.q, self.out) if self.over == "memory" else (self.q, self.k, self.v, self.out)
        weights = sum(m.in_features * m.out_features for m in maps if isinstance(m, nn.Linear))
        looks = pairs(self.pattern, length, past, self.heads)
        kept = past + length if self.over == "memory" else self.slots_for(past + length) + 1 if self.streams else 0
        flops = 2 * weights * length + round(looks * 4 * self.heads * self.dim)
        new_keys = 0 if self.over == "memory" else length
        flops += self.score.flops(length, new_keys, looks) + self._place_flops(length, past + length, looks)
        return Cost(flops, kept * (self.kv_heads * (self.key_dim + self.dim) * size + 8) + 8 * (self.over == "memory"))

    def _place_flops(self, length: int, keys: int, looks: float) -> int:
        """Return the flops of the position's own products. A cache that drops keys is read in chunks and holds
        fewer."""
        kept = self.slots_for(keys) if self.streams and self.over == "self" else keys
        if kept == keys:
            return self.position.flops(length, keys, looks)
        chunks = [CHUNK] * (length // CHUNK) + [length % CHUNK] * (length % CHUNK > 0)
        return sum(self.position.flops(chunk, kept, looks * chunk / length) for chunk in chunks)

    def growth(self) -> Growth:
        if self.over == "memory" or not self.pattern.fixed:
            return Growth("n²·d", "1", "1")
        short, long = (pairs(self.pattern, n) / n for n in (1024, 4096))
        power = math.log(long / short, 4)  # of the keys that a query looks at, as a function of n
        keys = "n²" if power > 0.9 else f"n·{long:.0f}" if power < 0.1 else f"n^{1 + power:.1f}"
        return Growth(f"{keys}·d", "1", _path(self.pattern))

    def value_path(self) -> Iterator[Tensor]:
        for m in (self.v, self.out):
            if isinstance(m, nn.Linear):
                yield m.weight


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    """Return whether two tables hold the same."""
    return one is two or (one is not None and two is not None and torch.equal(one, two))


def _follow(step: AttentionStep, first: Cache | Source, state: Cache | Source) -> AttentionStep | None:
    """Return the step of another layer with the same history as the first one; None where it differs."""
    if isinstance(first, Source) and isinstance(state, Source) and step.state is first:
        same = state.at is first.at and state.rows is first.rows and state.keys.dtype == first.keys.dtype
        keys, values = state.keys.transpose(1, 2), state.values.transpose(1, 2)
        return step._replace(state=state, keys=keys, values=values) if same else None
    if not isinstance(first, Cache) or not isinstance(state, Cache) or state.at is not first.at:
        return None
    if state.row_owner is not first.row_owner or step.keys is not first.keys or state.keys.dtype != first.keys.dtype:
        return None  # or the first one had to grow, or to gather its rows
    after = Cache(state.keys, state.values, step.state.at, step.state.row_owner)
    return step._replace(state=after, keys=state.keys, values=state.values)


def _places(memory: Memory, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions of a memory's columns, (1, m), the same with -1 for padding, (batch, m), and row numbers."""
    at = torch.arange(memory.x.shape[1], device=memory.x.device)[None]
    marked = at.expand(batch, -1) if memory.valid is None else torch.where(memory.valid, at, -1)
    return at, marked, torch.arange(batch, device=at.device)


def _check_not_blind(pattern: Pattern, length: int, valid: Tensor | None = None) -> None:
    if torch.compiler.is_compiling():  # a compiled graph cannot depend on values
        return
    lost = first_blind_query(pattern, length, valid)
    if lost is not None:
        raise UserError(f"pattern '{pattern}' leaves position {lost} with nothing to see: add, say, '| window(1)'")


def attention_position(spec: Position | str | dict, place: Place | None, **inherited: int) -> Position:
    """Return the position of an attention, from its name, its table, or the one that its stack shares."""
    if spec == "shared":
        if place is None or place.position is None:
            raise UserError("position = 'shared' needs a position in the enclosing stack")
        return place.position.for_layer()
    position = part(Position, spec, place=place, **inherited)
    if position.acts("embed"):
        name = name_of(position)
        raise UserError(f"position '{name}' acts on token vectors: name it in the embed, not in an attention")
    return position


def _path(pattern: Pattern) -> str:
    """Return the maximum number of layers between two positions that can reach each other, as a function of n."""

    def hops(length: int) -> int:
        once = pattern.mask(length).any(0).float()
        reach, count = once, 1
        while True:
            further = ((reach @ once) > 0).float()
            if bool((further <= reach).all()):
                return count
            reach, count = torch.maximum(reach, further), count + 1

    short, long = hops(128), hops(256)
    return str(long) if short == long else f"n/{256 / long:.0f}" if long > 1.6 * short else f"about {long} at n = 256"
