"""Key-value caches: of a sequence that grows, and of a source that does not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core.mixer import pad_and_cat
from regard.ops.dispatch import inference_kernels

SLOT_MULTIPLE = 8  # cache sizes are multiples of this
SPARE_SLOTS = 24  # at most, allocated besides those in use


class Cache(NamedTuple):
    """Keys and values of the positions that may still be attended to. Layers share `at` and `row_owner`, so these are
    never written in place; keys and values are."""

    keys: Tensor  # (batch, slots + 1, kv_heads, key_dim); the last slot is for padding
    values: Tensor  # (batch, slots + 1, kv_heads, dim)
    at: Tensor  # (batch, slots + 1) the position in each slot, -1 for none
    row_owner: Tensor | None = None  # (batch, slots + 1) the row that holds each slot; None: each row its own

    @property
    def capacity(self) -> int:
        return self.at.shape[1] - 1

    def select(self, rows: Tensor) -> Cache:
        """Return a copy of some rows, with only the slots in use and the next one."""
        used = (self.at[:, :-1] >= 0).any(0).nonzero()
        keep = min(_round(int(used[-1]) + 2 if len(used) else 0), self.capacity) + 1
        own = self.materialize()
        keys, values = (_rows_of(tensor, rows, keep) for tensor in own[:2])
        return Cache(keys, values, own.at[:, :keep].index_select(0, rows))

    def reorder(self, rows: Tensor, shared: dict) -> Cache:
        """Return `select(rows)` without copying: `row_owner` records which row holds each slot. Layers with the same
        `at` and `row_owner` keep them in common: `shared` holds those of the layers before."""
        unless = "there are more rows than before" if len(rows) > len(self.keys) else ""
        if inference_kernels(self.keys, op="cache reorder", unless=unless) is None:
            return self.select(rows)
        key = id(self.at), id(self.row_owner)
        if key not in shared:
            own = rows[:, None].expand(-1, self.capacity + 1).contiguous()
            shared[key] = self.at[rows], own if self.row_owner is None else self.row_owner[rows]
        return Cache(self.keys, self.values, *shared[key])

    def materialize(self) -> Cache:
        """Return the cache with all slots copied into their own rows."""
        if self.row_owner is None:
            return self
        slot = torch.arange(self.capacity + 1, device=self.at.device)
        return Cache(self.keys[self.row_owner, slot], self.values[self.row_owner, slot], self.at)

    def grow(self, capacity: int) -> Cache:
        """Return the cache with at least this capacity, grown geometrically; rows that are no longer used may be
        dropped."""
        kept = self.materialize() if 2 * len(self.at) <= len(self.keys) else self
        return kept.widen(max(_round(capacity), self.capacity + self.capacity // 2))

    def widen(self, capacity: int) -> Cache:
        """Return the cache with at least this capacity."""
        more = capacity - self.capacity
        if more <= 0:
            return self
        keys, values = (_extend(tensor, more) for tensor in self[:2])
        row_owner = (
            None
            if self.row_owner is None
            else torch.cat((self.row_owner, self.row_owner.new_zeros(len(self.at), more)), 1)
        )
        return Cache(keys, values, torch.cat((self.at, self.at.new_full((len(self.at), more), -1)), 1), row_owner)

    @staticmethod
    def join(caches: Sequence[Cache]) -> Cache:
        keys, values, at = zip(*(cache.materialize()[:3] for cache in caches), strict=True)
        return Cache(pad_and_cat(keys), pad_and_cat(values), pad_and_cat(at, -1))


class Source(NamedTuple):
    """Keys and values of an encoder's output, which does not change while decoding. Rows may share them."""

    keys: Tensor  # (sources, kv_heads, m, key_dim)
    values: Tensor  # (sources, kv_heads, m, dim)
    at: Tensor  # (sources, m) positions, -1 for padding
    rows: Tensor  # (batch,) the source of each row

    def select(self, rows: Tensor) -> Source:
        return self._replace(rows=self.rows[rows])

    def reorder(self, rows: Tensor, shared: dict) -> Source:
        """Return `select(rows)`: this very state where no row gets another source, as for the beams of a sentence."""
        key = id(self.rows)
        if key not in shared:
            new = self.rows[rows]
            shared[key] = None if torch.equal(new, self.rows) else new
        return self if shared[key] is None else self._replace(rows=shared[key])

    @staticmethod
    def join(sources: Sequence[Source]) -> Source:
        keys, values, at, rows = zip(*sources, strict=True)
        before = accumulate((len(places) for places in at), initial=0)
        mine = [own + ahead for own, ahead in zip(rows, before, strict=False)]
        return Source(pad_and_cat(keys), pad_and_cat(values), pad_and_cat(at, -1), torch.cat(mine))

    def materialize(self) -> Source:
        """Return the sources such that each is used by the same number of consecutive rows, in order."""
        sources, batch = len(self.at), len(self.rows)
        own = torch.arange(sources, device=self.rows.device)
        if batch % sources == 0 and torch.equal(self.rows, own.repeat_interleave(batch // sources)):
            return self
        wanted, rows = self.rows.unique_consecutive(return_inverse=True)
        if batch % len(wanted) or not torch.equal(rows, own.new_tensor(range(batch)) // (batch // len(wanted))):
            wanted, rows = self.rows, torch.arange(batch, device=self.rows.device)
        return Source(*(tensor.index_select(0, wanted) for tensor in self[:3]), rows)


def _rows_of(tensor: Tensor, rows: Tensor, slots: int) -> Tensor:
    """Return a copy of some rows of a tensor (rows, slots or more, ...); without gradients, with spare memory to grow
    in place, if the tensor has some."""
    if torch.is_grad_enabled():
        return tensor[:, :slots].index_select(0, rows)
    behind = max(min(tensor.stride(0) // max(tensor.stride(1), 1), slots + SPARE_SLOTS), slots)
    new = tensor.new_empty(len(rows), behind, *tensor.shape[2:])[:, :slots]
    return torch.index_select(tensor[:, :slots], 0, rows, out=new)


def _extend(tensor: Tensor, more: int) -> Tensor:
    """Return tensor (rows, slots, ...) with `more` slots of zeros added, in place if it has the spare memory."""
    rows, slots = tensor.shape[:2]
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    in_place = tensor.stride(0) >= tensor.stride(1) * (slots + more) and room >= tensor.stride(0) * rows
    if torch.is_grad_enabled() or not in_place:
        return torch.cat((tensor[:, :-1], tensor.new_zeros(rows, more + 1, *tensor.shape[2:])), 1)
    longer = tensor.as_strided((rows, slots + more, *tensor.shape[2:]), tensor.stride())
    longer[:, slots - 1 :] = 0
    return longer


def grow_slots(tensor: Tensor, slots: int) -> Tensor:
    """Return tensor (rows, slots + 1, ...), whose last slot is for padding, with at least so many slots."""
    have = tensor.shape[1] - 1
    return tensor if slots <= have else _extend(tensor, max(_round(slots), have + have // 2) - have)


def _round(slots: int) -> int:
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE


def common_slot(slot: Tensor) -> Tensor | int:
    """Return the slot as an int where slot (batch, n) is the same for all rows, as for the next token of equally long
    rows on a CPU; otherwise `slot`."""
    if slot.shape[1] != 1 or slot.device.type != "cpu":
        return slot
    one = int(slot[0, 0])
    return one if len(slot) == 1 or bool((slot == one).all()) else slot


def written_copy(table: Tensor, slot: Tensor | int, new: Tensor) -> Tensor:
    """Return a copy of table (batch, slots) in which table[row, slot[row, i]] = new[row, i]."""
    return write(table.clone(), slot, new)


def write(cache: Tensor, slot: Tensor | int, new: Tensor) -> Tensor:
    """Set cache[row, slot[row, i]] = new[row, i], in place unless gradients are enabled: the backward pass of queries
    needs the keys as they were."""
    slot = common_slot(slot) if isinstance(slot, Tensor) else slot
    learns = torch.is_grad_enabled()
    if isinstance(slot, int) and not learns:
        cache.narrow(1, slot, 1).copy_(new)
        return cache
    rows = torch.arange(cache.shape[0], device=cache.device)[:, None]
    put = cache.index_put if learns else cache.index_put_
    return put((rows, torch.as_tensor(slot, device=cache.device)), new.to(cache.dtype))
