"""A model: an encoder, a decoder or both, between an embed and a head. It maps tokens to logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UserError, nearest
from regard.ops.dispatch import hooked, touched
from regard.ops.linear import linear
from regard.pattern.algebra import Pattern
from regard.schema import make, part

from .context import Call, Context, Memory, check_valid
from .contracts import Embed, Head, Norm, Position
from .length import Length
from .mixer import Cost, Mixer, same_layout
from .passes import Pass
from .stack import Place, Stack
from .state import State

KINDS = ("encoder", "decoder", "encoder-decoder")
StepStack = Callable[[Tensor, tuple, Context], tuple[Tensor, tuple]]
TIES = ("none", "target", "source-target", "all")


class Model(nn.Module):
    """The constructor is the schema of a recipe's [model].

    kind:    encoder (whole sequences), decoder (step by step) or encoder-decoder.
    vocab:   size of the vocabulary, or a pair: source, target.
    tie:     none; target: the head shares the decoder's embedding; source-target: both embeddings are one; all: both.
    encoder, decoder: tables for a Stack (depth, layer, norm, ...) when there are two; otherwise these keys are in
             [model] itself.
    dropout: inherited by the embeds and the wirings.
    length:  makes the decoder of an encoder-decoder parallel: it writes all tokens at once, and this part decides how
             many there are. None: it is autoregressive.
    passes:  change the model once it is built, in this order: names or tables, such as bitnet.
    """

    def __init__(
        self,
        kind: str,
        width: int,
        vocab: int | tuple[int, int] | list[int],
        heads: int = 1,
        depth: int = 1,
        layer: list | dict | None = None,
        norm: Norm | str | dict = "none",
        position: Position | str | dict = "none",
        share: str = "none",
        dropout: float = 0.0,
        embed: Embed | str | dict = "tokens",
        head: Head | str | dict = "vocabulary",
        tie: str = "none",
        encoder: dict | None = None,
        decoder: dict | None = None,
        passes: list | None = None,
        length: Length | str | dict | None = None,
    ):
        super().__init__()
        if kind not in KINDS:
            raise UserError(f"unknown kind '{kind}'{nearest(kind, KINDS)}")
        if tie not in TIES:
            raise UserError(f"unknown tie '{tie}'{nearest(tie, TIES)}")
        self.kind, self.width = kind, width
        self.source_vocab, self.vocab = source_vocab, target_vocab = _pair(vocab)
        inherited = {"width": width, "heads": heads, "dropout": dropout}
        own = {"depth": depth, "layer": layer, "norm": norm, "position": position, "share": share}
        tables = {side: dict(table or {}) for side, table in (("encoder", encoder), ("decoder", decoder))}
        if kind == "encoder-decoder":
            for key, value in own.items():
                if key != "depth" and value not in (None, "none"):
                    raise UserError(f"an encoder-decoder has encoder.{key} and decoder.{key}, one each", (key,))
            for side, table in tables.items():
                if "layer" not in table:
                    raise UserError(f"needs at least one [[model.{side}.layer]]", (side,))
                table.setdefault("depth", depth)
        else:
            other = "decoder" if kind == "encoder" else "encoder"
            if tables[other]:
                raise UserError(f"a model of kind '{kind}' has no {other}", (other,))
            tables[kind] = {k: v for k, v in own.items() if v is not None} | tables[kind]
            if "layer" not in tables[kind]:
                raise UserError("needs at least one [[model.layer]]")
        embeds = {side: table.pop("embed", embed) for side, table in tables.items()}
        depths = {side: table.get("depth", 0) if table else 0 for side, table in tables.items()}

        def embed_for(side: str, size: int) -> Embed:
            return part(Embed, embeds[side], vocab=size, **inherited)

        def stack_for(side: str, memory: int | None) -> Stack:
            place = Place(side, depths["encoder"], depths["decoder"], memory)
            try:
                stack = make(Stack, tables[side], inherited | {"place": place}, side)
                if side == "decoder" and length is None:
                    stack.check_streams()
                return stack
            except UserError as error:
                raise (error.inside(side) if kind == "encoder-decoder" else error) from error.__cause__

        self.source_embed = embed_for("encoder", source_vocab) if kind == "encoder-decoder" else None
        self.encoder = stack_for("encoder", None) if kind == "encoder-decoder" else None
        side = "encoder" if kind == "encoder" else "decoder"
        self.embed = embed_for(side, target_vocab)
        self.stack = stack_for(side, self.encoder.width if self.encoder else None)
        self.head = part(Head, head, width=self.stack.width, vocab=target_vocab)
        if kind != "encoder" and length is None and not self.head.streams:
            raise UserError("looks ahead, and a decoder must not: choose another head, or kind 'encoder'", ("head",))
        if length is not None and kind != "encoder-decoder":
            raise UserError(f"a length is for an encoder-decoder that writes all tokens at once, not a {kind}")
        self.length = None if length is None else part(Length, length, width=self.encoder.width)  # type: ignore[union-attr]
        self._tie(tie)
        for index, spec in enumerate(passes or []):
            try:
                part(Pass, spec)(self)
            except UserError as error:
                raise UserError(error.message, ("passes", f"[{index}]", *error.path[1:])) from error.__cause__

    def _tie(self, tie: str) -> None:
        table = self.embed.table
        if tie != "none" and table is None:
            raise UserError(f"tie = '{tie}' needs an embed with a table")
        if tie in ("source-target", "all"):
            if self.source_embed is None or self.source_vocab != self.vocab:
                raise UserError(f"tie = '{tie}' needs an encoder-decoder whose two sides have one vocabulary")
            self.source_embed.share(table)  # type: ignore[arg-type]
        if tie in ("target", "all"):
            self.head.tie(self.embed)

    @cached_property
    def limit(self) -> int | None:
        """The longest sequence that the decoder's positions allow; None: any."""
        return _limit(self.embed, self.stack)

    @cached_property
    def source_limit(self) -> int | None:
        """The longest source that the encoder's positions allow; None: any."""
        return None if self.encoder is None or self.source_embed is None else _limit(self.source_embed, self.encoder)

    def encode(
        self, source: Tensor, valid: Tensor | None = None, segments: Tensor | None = None, run: Callable | None = None
    ) -> Memory:
        """source (batch, source time) -> the memory for cross-attention. run: instead of `forward_with_states`."""
        if self.encoder is None or self.source_embed is None:
            raise UserError(f"a model of kind '{self.kind}' has no encoder to give a source to")
        embed = self.source_embed
        context = self._context(embed.extent(source), source.device, valid, segments, None, None, self.source_limit)
        wanted = any(m.uses_layer_outputs for m in self.stack.modules() if isinstance(m, Mixer))
        x, states, outputs = (run or self.encoder.forward_with_states)(embed(source, context), context, wanted)
        vectors = embed.vectors(source) if self.embed.copies_source else None
        embedded = () if vectors is None else (vectors, embed.position.embed(vectors, context.positions[:1]))
        memory = Memory(x, valid, states, outputs, embedded)
        copies = None if self.length is None else self.length.candidates(memory, 1).copies
        return memory if copies is None else memory._replace(copies=copies[:, 0])

    def forward(
        self,
        tokens: Tensor,
        valid: Tensor | None = None,
        source: Tensor | None = None,
        source_valid: Tensor | None = None,
        memory: Memory | None = None,
        pattern: Pattern | str | None = None,
        segments: Tensor | None = None,
        call: Call | None = None,
    ) -> Tensor:
        """tokens (batch, time) -> logits (batch, time, vocab), or whatever the head returns. call: the step to take,
        where `step` calls the model for its hooks."""
        if call is not None:
            x, context, call.state = self.advance(tokens, call.state, valid, segments)
            return self.head(x, context)
        memory, extent = self._encoded(source, source_valid, memory), self.embed.extent(tokens)
        context = self._context(extent, tokens.device, valid, segments, memory, pattern, self.limit)
        return self.head(self.hidden(tokens, context), context)

    def hidden(self, tokens: Tensor, context: Context) -> Tensor:
        """Return the hidden vectors before the head: (batch, time, width)."""
        return self.stack(self.embed(tokens, context), context)

    def random_inputs(self, batch: int, time: int) -> dict[str, Tensor]:
        """Return random inputs of the right kind, for tests; a source is a little shorter."""
        embed = self.source_embed
        source = {} if embed is None else {"source": embed.random_input(batch, max(time - 2, 1))}
        return {"tokens": self.embed.random_input(batch, time), **source}

    def start(
        self,
        batch: int,
        capacity: int,
        source: Tensor | None = None,
        source_valid: Tensor | None = None,
        memory: Memory | None = None,
    ) -> State:
        """Return the empty state for `batch` rows with a capacity of `capacity` positions. The encoder runs here."""
        self._check_can_step()
        if self.limit is not None and capacity > self.limit:
            raise UserError(f"the model's positions reach {self.limit}; a capacity of {capacity} is beyond them")
        memory = self._encoded(source, source_valid, memory)
        if memory is not None and memory.x.shape[0] != batch:
            raise UserError(f"a batch of {batch} rows cannot attend to a source of {memory.x.shape[0]} rows")
        device = next(self.parameters()).device
        context = Context.begin(batch, 0, device, memory=memory)
        lengths = torch.zeros(batch, dtype=torch.long, device=device)
        return State.of_new_buffers(lengths, self.stack.start(context, capacity))

    def step(
        self, tokens: Tensor, state: State, valid: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Take the next tokens (batch, n) of every row -> logits (batch, n, vocab), and the state after them."""
        call = Call(self, state)
        if hooked(self):
            return self(tokens, valid=valid, segments=segments, call=call), call.state
        return self.forward(tokens, valid, segments=segments, call=call), call.state

    def last_hidden(
        self, tokens: Tensor, state: State, valid: Tensor | None = None, step_stack: StepStack | None = None
    ) -> tuple[Tensor, State]:
        """Take a step and return the hidden vectors (batch, width) at the last real token of every row, and the state
        after it. `logits` turns any number of these vectors into logits."""
        x, context, state = self.advance(tokens, state, valid, None, step_stack)
        if valid is None:
            return x[:, -1], state
        return x[torch.arange(len(x), device=x.device), context.lengths - 1], state

    def reorder(self, state: State, rows: Tensor) -> State:
        """Return `select(state, rows)`, and give `state` up: what beam search does after every step."""
        state = self._with_free_buffers(state)
        reordered = state.of_rows(rows, self.stack.reorder(state.layers, rows))
        state.version.history.given_up = True
        return reordered

    def _with_free_buffers(self, state: State) -> State:
        """Return the state, or a copy, whose buffers may be written without harm to other states."""
        version, history = state.version, state.version.history
        version.check_not_given_up()
        if state.lengths.is_inference() and not torch.is_inference_mode_enabled():
            state = state.outside_inference()
            version = state.version
        elif history.in_graph and not torch.is_grad_enabled():  # and would be written in place
            state = state.copy()
            version = state.version
        if not version.may_be_overwritten:
            return state
        ends = zip(state.lengths.tolist(), history.furthest.tolist(), strict=True)
        for begin, end in {(begin, end) for begin, end in ends if begin < end}:
            for module in self.stack.modules():
                if isinstance(module, Mixer) and not module.can_return(begin, end):
                    raise UserError(
                        f"this state holds {begin} positions, and steps from it went on to {end}: its cache has "
                        "dropped keys that it needs. Keep a copy, `state.copy()`, before you step so far"
                    )
        return state if version.is_newest or version.is_newest_alive else state.copy()

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the next token: x (rows, width) from `last_hidden` -> (rows, vocab)."""
        return self.head(x[:, None], Context.begin(len(x), 1, x.device))[:, 0]

    def logits_for(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function like `logits` for some tokens (n,) alone: (rows, n)."""
        projection = self.output_projection()
        if projection is None:
            raise UserError("this model's logits are not one matrix product, so no tokens can be left out")
        before, table, bias = projection
        table, bias = table[tokens], None if bias is None else bias[tokens]
        return lambda x: linear(before(x), table, bias)

    @property
    def is_head_touched(self) -> bool:
        """Whether the head is hooked, or it or `logits` is replaced, so that logits are more than a product."""
        return "logits" in vars(self) or any(map(touched, self.head.modules()))

    def output_projection(self) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor | None] | None:
        """Return `before`, table (vocab, n) and bias (vocab,) where `logits(x)` is before(x) table^T + bias; None where
        it is not."""

        def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
            return self.head.linear(x[:, None], Context.begin(len(x), 1, x.device))

        if self.is_head_touched:
            return None
        found = parts(next(self.parameters()).new_zeros(1, self.stack.width))
        if found is None:
            return None
        return lambda x: parts(x)[0][:, 0], found[1], found[2]  # type: ignore[index]

    def advance(
        self,
        tokens: Tensor,
        state: State,
        valid: Tensor | None = None,
        segments: Tensor | None = None,
        step_stack: StepStack | None = None,
    ) -> tuple[Tensor, Context, State]:
        """Take a step up to the head: return the hidden vectors (batch, n, width), the context for the head, and the
        state.

        step_stack: takes the stack's step instead of `self.stack.step`, as in a decoding session.
        """
        batch, time = self.embed.extent(tokens)
        if not isinstance(state, State):
            raise UserError(f"a step needs a state that `start` or `step` returned, not {type(state).__name__}")
        if state.lengths.shape[0] != batch:
            raise UserError(f"a state of {state.lengths.shape[0]} rows cannot continue with a batch of {batch}")
        if valid is not None:
            check_valid(valid, batch, time)
        context = Context.after(state.lengths, time, valid=valid, segments=segments)
        if time == 0:
            return self.embed(tokens, context).new_zeros(batch, 0, self.stack.width), context, state
        if self.limit is not None and context.last_position >= self.limit:
            raise UserError(f"position {context.last_position} is beyond the model's {self.limit} positions")
        state, x = self._with_free_buffers(state), self.embed(tokens, context)
        lengths = state.lengths + context.lengths
        version = state.version.after(lengths)  # also where the step fails, when some layers have written already
        try:
            x, layers = (step_stack or self.stack.step)(x, state.layers, context)
        except UserError:
            raise
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            if self._owns(state):
                raise
            raise UserError("this state belongs to another model: begin with `start` of the model that steps") from None
        return x, context, State(lengths, layers, version)

    def _owns(self, state: State) -> bool:
        """Return whether a state has the layout of this model's states; called only when a step has failed."""

        def empty(capacity: int) -> tuple:
            embed, device = self.source_embed, state.lengths.device
            source = None if embed is None else embed.random_input(1, capacity).to(device)
            return self.start(1, capacity, source).layers

        longest = min(limit for limit in (self.limit, self.source_limit, 300) if limit is not None)
        return same_layout(state.layers, empty(1), empty(longest))

    def cost(self, length: int, past: int = 0) -> Cost:
        """Return the cost of `length` positions of the decoder (or of an encoder without one) for one sequence."""
        cost = self.stack.cost(length, past)
        return Cost(self.embed.flops(length) + cost.flops + self.head.flops(length), cost.state)

    def _encoded(self, source: Tensor | None, valid: Tensor | None, memory: Memory | None) -> Memory | None:
        if source is not None:
            return self.encode(source, valid)
        if memory is None and self.kind == "encoder-decoder":
            raise UserError("an encoder-decoder needs a source: model(tokens, source=...) or memory=model.encode(...)")
        return memory

    def _context(
        self, extent: tuple[int, int], device: Any, valid: Any, segments: Any, memory: Any, pattern: Any, limit: Any
    ) -> Context:
        batch, time = extent
        pattern = None if pattern is None else part(Pattern, pattern)
        if valid is not None:
            check_valid(valid, batch, time)
        if limit is not None and time > limit:
            raise UserError(f"a sequence of {time} is longer than this model's {limit} positions")
        return Context.begin(batch, time, device, valid=valid, memory=memory, pattern=pattern, segments=segments)

    def _check_can_step(self) -> None:
        if self.head.pools:
            raise UserError("this model gives one output per sequence, so it does not step; call it on whole ones")
        if self.length is not None:
            raise UserError("this decoder writes all tokens at once, so it does not step; call it on a whole canvas")
        if not self.stack.streams or not self.head.streams:
            raise UserError("this model looks ahead, so it does not step; call it on whole sequences")


def _limit(*modules: nn.Module) -> int | None:
    limits, left = [], list(modules)
    while left:
        module = left.pop()
        if isinstance(module, Position | Mixer) and module.limit is not None:
            limits.append(module.limit)
        if not (isinstance(module, Mixer) and module.restarts):
            left += module.children()
    return min(limits, default=None)


def _pair(vocab: Any) -> tuple[int, int]:
    """Return the sizes of the source and the target vocabulary."""
    pair = tuple(vocab) if isinstance(vocab, list | tuple) else (vocab, vocab)
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair):
        raise UserError(f"vocab must be a whole number from 1 on, or a pair of them: source and target, not {vocab!r}")
    return pair[0], pair[1]
