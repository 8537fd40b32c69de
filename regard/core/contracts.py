"""The contracts of what stands around the mixers: norms, positions, scores, embeds and heads; and dropout. The contract
of mixers is in mixer.py, that of wirings in stack.py."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.ops.dispatch import hooked
from regard.ops.dropout import dropout, dropout_add
from regard.ops.embedding import embedding
from regard.schema import name_of, part

from .context import Context
from .fusion import FusedEmbed, FusedNorm, RotaryTables


class Norm(nn.Module):
    """x (batch, time, width) -> the same shape. Statistics over positions use real positions only, and in eval
    mode the running ones of training, so that no position depends on another."""

    folder: ClassVar[tuple[str, ...]] = ("norms",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    is_identity: bool = False  # its output is its input

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def fused(self) -> FusedNorm | None:
        """Return a description of the norm for a kernel, where it treats every vector alone; None where it does not."""
        return None


def zero_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return x (batch, time, width) with zeros where a position is not real."""
    return x if valid is None else torch.where(valid[..., None], x, 0.0)


def count_valid(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return the number of real positions, at least 1, as a float to divide by."""
    positions = torch.tensor(x[..., 0].numel(), device=x.device) if valid is None else valid.sum()
    return positions.clamp(min=1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)


class Position(nn.Module):
    """Does nothing by default; a part overrides the methods it needs.

    limit:    the longest sequence that it can encode; None: any.
    relative: scores depend on differences of positions alone; the laws then shift all positions and compare.
    needs_query: its bias depends on the query, so the score must be a dot product.
    """

    folder: ClassVar[tuple[str, ...]] = ("positions",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    limit: int | None = None
    relative: bool = False
    needs_query: bool = False
    adds_vectors: bool = False  # `embed` adds a vector to that of each token, which does not depend on the token

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Act on token vectors: x (batch, time, width), at (batch or 1, time)."""
        return x

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        """Act on queries, before the score: q (batch, heads, time, dim), at (batch or 1, time)."""
        return q

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        """Act on keys, before they are cached: k (batch, kv_heads, time, dim), at (batch or 1, time)."""
        return k

    def value(self, v: Tensor, at: Tensor) -> Tensor:
        """Act on values, before they are cached: v (batch, kv_heads, time, dim), at (batch or 1, time)."""
        return v

    def bias_query(self, q: Tensor) -> Tensor:
        """Return the query that `bias` gets where it `needs_query`, from the projected q (batch, heads, time, dim)."""
        return q

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor | None:
        """Return what is added to scores, broadcastable to (batch, heads, n, m), in the dtype of q.

        query_at (batch or 1, 1, n, 1), key_at (batch or 1, 1, 1, m) with -1 for keys that are not real. Where it
        `needs_query`, q (batch, heads, n, dim) is `bias_query` after the score's `query`, so it is scaled already and
        the part must not scale again. Otherwise only the dtype of q matters."""
        return None

    def output_bias(self, weights: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor | None:
        """Return what is added to the output: weights (batch, heads, n, m) -> (batch, heads, n, dim)."""
        return None

    def rotary_tables(self, context: Context, dtype: torch.dtype) -> RotaryTables | None:
        """Return the rotation in a step of one position, where rotating queries and keys is all it does; or None."""
        return None

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        """Return the flops of the matrix products that it adds, for all heads of one sequence: new queries, all keys,
        and the (query, key) pairs per head."""
        return 0

    def acts(self, method: str) -> bool:
        """Return whether this part overrides `method`: embed, query, key, value, bias or output_bias."""
        return getattr(type(self), method) is not getattr(Position, method)

    def for_layer(self) -> "Position":
        """Return the position for one more layer that shares it: itself, unless some weights are per layer."""
        return self


class Score(nn.Module):
    """Most scores are a dot product of a transformed query and a transformed key; those override `query` and `key` and
    run on every kernel. The others override `forward` and run on the reference kernel.

    cached: channels of a key after `key`, as they are cached; None: those of a head.
    factor: the number that the query is multiplied by, where that is all the score does; None where it does more.
    birth:  the query projection is multiplied by it at initialization, instead of a scale in the score.
    """

    folder: ClassVar[tuple[str, ...]] = ("scores",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    cached: int | None = None
    factor: float | None = None
    birth: float = 1.0

    def query(self, q: Tensor) -> Tensor:
        """Transform q (batch, heads, n, dim)."""
        return q

    def key(self, k: Tensor) -> Tensor:
        """Transform k (batch, kv_heads, m, dim), once, before it is cached."""
        return k

    def forward(self, q: Tensor, k: Tensor, key_at: Tensor) -> Tensor:
        """Compare q and k (batch, heads, n or m, channels), the outputs of `query` and `key`, k repeated for the heads
        that share it; key_at (batch or 1, m) is -1 for keys that are not real -> (batch, heads, n, m)."""
        return q @ k.mT

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        """Return the flops of matrix products besides the dot product over a head's channels, for all heads of one
        sequence: new queries, new keys (0 when all are cached), and (query, key) pairs per head."""
        return 0

    @property
    def is_dot(self) -> bool:
        return type(self).forward is Score.forward


class Embed(nn.Module):
    """Maps an input to (batch, time, width). Subclasses define `forward` and `random_input`.

    position: acts on the embedded vectors: sinusoidal, learned, ...
    norm:     applied after the position.
    dim:      channels of the embedded vectors, projected to the width last (ALBERT); None: the width itself.
    table:    the matrix (vocab, dim) that a tied head or another embed may share; None: there is none.
    reads:    the kind of input: text, images, ...
    whole_words: it works best with tokens that are whole words.
    copies_source: it reads `Memory.embedded`, the source vectors.
    """

    folder: ClassVar[tuple[str, ...]] = ("embeds",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    reads: ClassVar[str] = "text"
    whole_words: ClassVar[bool] = False
    copies_source: bool = False
    table: nn.Parameter | None

    def __init__(
        self,
        width: int,
        position: Position | str | dict = "none",
        norm: Norm | str | dict = "none",
        dropout: float = 0.0,
        dim: int | None = None,
    ):
        super().__init__()
        self.width, self.dim = width, dim or width
        self.position = part(Position, position, width=self.dim, dim=self.dim, heads=1)
        if any(self.position.acts(place) for place in ("query", "key", "value", "bias", "output_bias")):
            raise UserError(f"position '{name_of(self.position)}' acts in attention: name it there")
        self.norm = part(Norm, norm, width=self.dim)
        self.drop = Dropout(dropout)
        self.up = nn.Identity() if dim is None else nn.Linear(dim, width)
        self.register_parameter("table", None)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        raise NotImplementedError

    def vectors(self, tokens: Tensor) -> Tensor:
        """Return the vectors (batch, time, dim) of tokens before the position is applied, for a canvas that copies
        them; only embeds of tokens can."""
        raise UserError(f"embed '{name_of(self)}' has no token vectors that a canvas could copy")

    def random_input(self, batch: int, time: int) -> Tensor:
        """Return a random input of the right kind, for tests."""
        raise NotImplementedError

    def extent(self, tokens: Tensor) -> tuple[int, int]:
        """Return batch and time of the output for an input; by default the input's first two dimensions."""
        if tokens.dim() < 2:
            raise UserError(f"a batch has two dimensions, rows and time, not the shape {tuple(tokens.shape)}")
        return tokens.shape[0], tokens.shape[1]

    def add_position(self, x: Tensor, context: Context) -> Tensor:
        """x (batch, time, dim) -> (batch, time, width): apply position, norm, dropout and projection."""
        at = context.positions[:1] if context.from_start else context.positions
        return self.up(self.drop(self.norm(self.position.embed(x, at), context.valid)))

    def fused(self) -> FusedEmbed | None:
        """Return a description of the embed in eval mode for a kernel; None where it does more."""
        return None

    def share(self, table: nn.Parameter) -> None:
        """Use this table instead of its own."""
        if self.table is None:
            raise UserError(f"embed '{name_of(self)}' has no table, so it cannot be tied")
        if table.shape != self.table.shape:
            raise UserError(f"an embed over {tuple(self.table.shape)} cannot share a table of {tuple(table.shape)}")
        self.table = table

    def flops(self, length: int) -> int:
        """Return the flops of matrix products for `length` positions."""
        return 2 * length * self.up.weight.numel() if isinstance(self.up, nn.Linear) else 0


def new_table(rows: int, dim: int, std: float | None = None) -> nn.Parameter:
    """Return a table (rows, dim) of normal numbers; without a `std`, rows have a length of about 1."""
    return nn.Parameter(torch.empty(rows, dim).normal_(std=dim**-0.5 if std is None else std))


def look_up(table: Tensor, ids: Tensor, name: str) -> Tensor:
    """Return rows of a table (rows, dim): ids (batch, time) -> (batch, time, dim). name: of the ids, for messages."""
    if ids.is_floating_point():
        raise UserError(f"{name} must be whole numbers, not {ids.dtype}")
    try:
        return embedding(ids, table)
    except IndexError:
        raise UserError(
            f"{name} range from {int(ids.min())} to {int(ids.max())}, but the table has rows 0 to {len(table) - 1}"
        ) from None


class Head(nn.Module):
    """x (batch, time, width) -> logits.

    pools:   it gives one output per sequence instead of one per position; such a model does not step.
    streams: False when an output may depend on later positions; such a model does not step either.
    """

    folder: ClassVar[tuple[str, ...]] = ("heads",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    pools: bool = False
    streams: bool = True

    def forward(self, x: Tensor, context: Context) -> Tensor:
        raise NotImplementedError

    def linear(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Return vectors, table (classes, width) and bias (classes,) where the logits are vectors table^T + bias, so
        that a loss need not hold all logits; None where they are not."""
        return None

    def target_logprobs(self, x: Tensor, context: Context, targets: Tensor) -> Tensor | None:
        """Return the log-probabilities of `targets` (batch, time), those below 0 left out, where that is less work than
        the logits of all tokens; None where it is not."""
        return None

    def tie(self, embed: Embed) -> None:
        """Share the weights of an embed that has a table."""
        assert embed.table is not None
        self.share(embed.table)

    def share(self, table: nn.Parameter) -> None:
        """Use an embedding's table as the weight; only heads over a vocabulary can."""
        raise UserError(f"head '{name_of(self)}' has no table, so it cannot be tied to the embedding")

    def flops(self, length: int) -> int:
        """Return the flops of matrix products for `length` positions."""
        raise NotImplementedError


class Dropout(nn.Module):
    """y = x / (1 - rate) where x is kept, 0 elsewhere. On a CPU the rate is rounded to a multiple of 1/65536."""

    def __init__(self, rate: float = 0.0):
        super().__init__()
        if not 0 <= rate <= 1:
            raise UserError(f"dropout must be from 0 to 1, not {rate}")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate) if self.training and self.rate else x

    def add(self, stream: Tensor, x: Tensor) -> Tensor:
        """Return stream + self(x), computed in one pass."""
        if hooked(self):
            return stream + self(x)
        return dropout_add(stream, x, self.rate) if self.training and self.rate else stream + x

    def extra_repr(self) -> str:
        return f"{self.rate}"
