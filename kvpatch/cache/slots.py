"""Storage of a layer's keys and values: slots that each head writes to, in any memory layout.

A layer uses its storage through `Slots` only. A storage holds just keys and values: positions and scores are [B,H,C] tensors
of the layer, C the storage's `width`, with -1 and 0 where a head has no slot. Heads are numbered n = b * H + h. Another
storage is a class here (or anywhere) and a line in `move_to_front` and `empty`, which choose one by a Layout.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backends.entries import EXACT, Codecs, Latent, centre_codecs, centre_of, map_centre
from ..backends.head_offsets import HeadOffsets
from ..backends.protocol import Memory
from ..policies.batched import change_tensors
from .growth import Layout, capacities, slack


class Slots(ABC):
    """Keys and values of one layer.

    keys, values: as a backend takes them, with `head_offsets` (None: [B,H,C,D]). appends: columns can be written after those
    in use; else a token goes into a free slot of each head. in_place: keys and values are the memory itself, not a copy of it.
    width: slots of the largest head. by_row: attributes whose tensors have the batch first. codecs: keys and values are entries
    of these (backends/entries.py): numbers, or bytes.
    """

    keys: Tensor
    values: Tensor
    appends: bool
    by_row: ClassVar[tuple[str, ...]] = ("stored", "codecs")
    in_place: bool = True
    head_offsets: HeadOffsets | None = None

    def __init__(self, keys: Tensor, values: Tensor, codecs: Codecs = EXACT) -> None:
        self.codecs = codecs
        self.stored = (keys, values)

    @property
    def latent(self) -> bool:
        """Tell whether values are a part of their keys, so that keys alone are stored, moved and written."""
        return self.codecs[1].latent

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that hold keys and values."""
        return (self.keys,) if self.latent else (self.keys, self.values)

    @stored.setter
    def stored(self, tensors: tuple[Tensor, ...]) -> None:
        self.keys, value = tensors[0], self.codecs[1]
        # latent attention stores no values: they are a view of a part of their keys
        self.values = value.within(self.keys) if isinstance(value, Latent) else tensors[1]

    def each(self, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return `change` of the stored keys and of the values; latent attention stores only keys, and they come twice."""
        changed = tuple(map(change, self.stored))
        return changed[0], changed[-1]

    @property
    @abstractmethod
    def width(self) -> int: ...

    @property
    def centre(self) -> Tensor | None:
        """The centre [B,H,1,D] that keys are rounded around, or None."""
        return centre_of(self.codecs)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.numel() * t.element_size() for t in (*self.stored, self.centre) if t is not None)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers in a key and in a value, [D] of each; a rounded one, too, is counted in numbers, not in bytes."""
        return self.codecs[0].size(self.keys), self.codecs[1].size(self.values)

    def numbers(self, used: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `used` columns, as `view` does; rounded ones are unpacked into copies."""
        keys, values = self.view(used)
        return self.codecs[0].decode(keys), self.codecs[1].decode(values)

    def as_transformers(self, used: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values that `numbers` returns in the form of transformers' caches.

        In latent attention a value (the latent) is the first part of its key, and the rotary key the rest: there transformers
        has the latents as keys, and the rotary keys as values.
        """
        keys, values = self.numbers(used)
        return (values, keys[..., values.shape[-1] :]) if self.latent else (keys, values)

    def encode_pair(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return new keys and values as they are stored: as they are, or rounded to 8 or 4 bits and packed in bytes."""
        keys, codec = self.codecs[0].encode(k), self.codecs[1]
        return keys, codec.within(keys) if isinstance(codec, Latent) else codec.encode(v)

    def fix_centre(self, positions_BHT: Tensor) -> None:
        """Fix the centre that keys are rounded around, in rows that have none yet, as a prompt (or block) ends.

        Called before keys are evicted or rounded. Only ReadingSlots has anything to do here.
        """
        return

    def close_columns(self, used: int) -> Slots:
        """Return slots with the first `used` columns, rounded or moved to an engine's pages; itself if neither is to be done.

        `SlotLayer.round` calls it where a prompt ends.
        """
        return self

    def move_to_buffers(self) -> Slots:
        """Return slots in memory that this layer alone owns, so that a prompt can be appended; itself if it owns its memory."""
        return self

    def join_in_place(self, others: list[Slots], width: int) -> Slots | None:
        """Return slots of these rows and then those of `others` that use the same memory; None if that needs copies.

        `_join_layer` calls it. width: slots that the largest head needs at its budget.
        """
        return None

    def flat(self) -> tuple[Tensor, Tensor]:
        """Return keys and values as entries [B*H*C or F,D], one for each slot."""
        return self.keys.reshape(-1, self.keys.shape[-1]), self.values.reshape(-1, self.values.shape[-1])

    def locate_entries(self) -> Memory:
        """Return the memory that keys and values lie in, as kernels address it, without copying any."""
        return Memory(self.keys, self.values)

    @abstractmethod
    def find_begins(self) -> Tensor:
        """Return the index, among the entries that `flat` returns, at which each head's slots begin, [B*H]."""

    @abstractmethod
    def rows(self, slot_BH: Tensor, flat_N: Tensor) -> Tensor:
        """Return the index, among the entries that `flat` returns, of one slot of each head, [B*H].

        slot_BH: the slot, counted within the head. flat_N: the same slot as an index into the flattened positions.
        """

    def rows_of(self, column_BHM: Tensor) -> Tensor:
        """Return the indices [B*H*M], among the entries that `flat` returns, of M columns of each head."""
        return (self.find_begins()[:, None] + column_BHM.flatten(0, 1)).flatten()

    def read_at(self, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the stored keys and values at flat indices (see `flat`), to move (`pack`) or log them."""
        keys, values = self.flat()
        entries = keys[rows_N]
        # in latent attention a value is a part of its key
        return entries, self.codecs[1].within(entries) if isinstance(self.codecs[1], Latent) else values[rows_N]

    def write_at(self, rows_N: Tensor, k: Tensor, v: Tensor) -> None:
        """Write an entry of a key and one of a value into each of these rows, in place."""
        for held, entries in zip(self.stored, (k, v), strict=False):  # values in their keys are written with these
            held.view(-1, held.shape[-1]).index_copy_(0, rows_N, entries.reshape(-1, held.shape[-1]))

    @abstractmethod
    def view(self, used: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `used` columns, as a backend takes them."""

    def outline_view(self, used: int) -> tuple[Tensor, Tensor]:
        """Return tensors of the shapes that `view` returns, to choose a backend by; contents may be any."""
        return self.view(used)

    # ---- sizes ----

    @abstractmethod
    def capacities(self) -> list[int]:
        """Return the slots of each head."""

    @abstractmethod
    def plan_slots(self, counts: list[int], goals: list[int] | None, ahead: int) -> list[int]:
        """Return the slots that each head would get now, having taken `counts`, with at least `ahead` free ones.

        goals: slots of each head at its budget, to which its slots are limited; None: nothing is evicted.
        """

    @abstractmethod
    def bound_slots(self, counts: list[int], goals: list[int] | None, ahead: int) -> int:
        """Return the most slots that all heads together may have by the slack of growth.py, if they hold `counts` tokens."""

    @abstractmethod
    def bound(self, counts: list[int], columns: int | None, ahead: int) -> tuple[int, int]:
        """Return how many slots are taken, and the most that may be allocated for them, for `_check_layer_bytes`.

        counts: tokens of each head. columns: those in use if tokens are appended, else None. ahead: free slots that each head
        may have in any case.
        """

    # ---- moving slots ----

    @abstractmethod
    def resized(self, capacities: list[int], goals: list[int] | None, used: int) -> Slots:
        """Return slots of these capacities that hold the first `used` columns, at the same slot indices.

        goals: slots of each head at its budget; ragged slots note by it how many of them queries attend to.
        """

    def map_rows(self, change: Callable[[Tensor], Tensor], B: int, H: int) -> Slots:
        """Return a copy whose batch-first attributes (`by_row`) are `change` of these: rows selected, reordered or repeated.

        B, H: batch rows and KV heads before the change.
        """
        new = copy.copy(self)
        for name in self.by_row:
            value = getattr(self, name)
            centred = name in ("codecs", "rounding")  # frozen objects that hold a tensor: the centre of rounded keys
            setattr(new, name, map_centre(value, change) if centred else change_tensors(value, change))
        return new

    @abstractmethod
    def make_dense(self, B: int, H: int) -> DenseSlots:
        """Return slots that columns can be appended to; itself if they can already."""


class DenseSlots(Slots):
    """Buffers [B,H,C,D], of which a layer uses the first columns."""

    appends = True

    @property
    def shape(self) -> tuple[int, ...]:
        """[B,H,C,D] of the keys."""
        return self.keys.shape

    @property
    def width(self) -> int:
        return self.shape[2]

    def find_begins(self) -> Tensor:
        B, H, C, _ = self.keys.shape
        return torch.arange(B * H, device=self.keys.device) * C

    def rows(self, slot_BH: Tensor, flat_N: Tensor) -> Tensor:
        return flat_N

    def view(self, used: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, :used], self.values[:, :, :used]

    def capacities(self) -> list[int]:
        B, H, C, _ = self.shape
        return [C] * (B * H)

    def plan_slots(self, counts: list[int], goals: list[int] | None, ahead: int) -> list[int]:
        return [max(capacities(counts, goals, max(slack(max(counts)), ahead)))] * len(counts)

    def bound_slots(self, counts: list[int], goals: list[int] | None, ahead: int) -> int:
        return sum(self.plan_slots(counts, goals, ahead))

    def bound(self, counts: list[int], columns: int | None, ahead: int) -> tuple[int, int]:
        held = max(counts) if columns is None else columns  # columns are as many as the longest row's
        return held * len(counts), (held + max(slack(held), ahead)) * len(counts)

    def append(self, start: int, k_BHQD: Tensor, v_BHQD: Tensor) -> None:
        """Write a pass's keys and values into the columns from `start` on, in place.

        `SlotLayer.append` and `SlotLayer.write` call it, once the buffers have room.
        """
        new = self.encode_pair(k_BHQD.detach(), v_BHQD.detach())  # rounded, if the slots hold 8 or 4 bits
        for held, entries in zip(self.stored, new, strict=False):  # latent attention stores keys alone
            held[:, :, start : start + k_BHQD.shape[2]] = entries

    def resized(self, capacities: list[int], goals: list[int] | None, used: int) -> DenseSlots:
        new = copy.copy(self)
        new.stored = tuple(fit_columns(t[:, :, :used], max(capacities), 0) for t in self.stored)
        return new

    def move_to_front(self, index_BHK: Tensor, kept_BHK: Tensor | None, layout: Layout) -> Slots:
        """End a prompt: return new slots of this layout, with each head's entries at `index_BHK` in front.

        `SlotLayer.allocate` calls it. kept_BHK: False where a head keeps fewer; None: nowhere. If `layout.filled` is set, each
        head gets its own number of slots (ragged).
        """
        if layout.filled is not None and kept_BHK is not None:
            offsets = HeadOffsets(layout.capacities, layout.filled, self.keys.device)
            return RaggedSlots(*self.each(lambda t: offsets.pack_entries(t, index_BHK, kept_BHK)), offsets, self.codecs)
        C = max(*layout.capacities, index_BHK.shape[-1])
        # each(): the function's results for stored keys and for values
        return DenseSlots(*self.each(lambda t: collect_entries(t, index_BHK, C, 0)), self.codecs)

    def make_dense(self, B: int, H: int) -> DenseSlots:
        return self


class RaggedSlots(Slots):
    """Entries [F,D] in which HeadOffsets gives each head a segment, for heads that hold different numbers of tokens."""

    appends = False

    def __init__(self, keys: Tensor, values: Tensor, head_offsets: HeadOffsets, codecs: Codecs) -> None:
        super().__init__(keys, values, codecs)
        self.offsets = self.head_offsets = head_offsets

    @property
    def width(self) -> int:
        return self.offsets.width

    def locate_entries(self) -> Memory:
        return Memory(self.keys, self.values, self.offsets.begin_N, self.offsets.capacity_N)

    def find_begins(self) -> Tensor:
        return self.offsets.begin_N

    def rows(self, slot_BH: Tensor, flat_N: Tensor) -> Tensor:
        return self.offsets.begin_N + slot_BH.reshape(-1)

    def view(self, used: int) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def numbers(self, used: int) -> tuple[Tensor, Tensor]:
        head, _ = self.offsets.places()  # of each entry; keys are rounded around a centre of their head
        key, value = (codec.of(head) for codec in self.codecs)
        return key.decode(self.keys[:, None])[:, 0], value.decode(self.values[:, None])[:, 0]

    def capacities(self) -> list[int]:
        return self.offsets.capacities

    def plan_slots(self, counts: list[int], goals: list[int] | None, ahead: int) -> list[int]:
        return capacities(counts, goals, max(slack(sum(counts) // len(counts)), ahead))

    def bound_slots(self, counts: list[int], goals: list[int] | None, ahead: int) -> int:
        return self.bound(counts, None, ahead)[1]

    def bound(self, counts: list[int], columns: int | None, ahead: int) -> tuple[int, int]:
        held, typical = sum(counts), sum(counts) // len(counts)  # typical: the mean of the heads, as in `plan_slots`
        return held, held + len(counts) * max(slack(typical), ahead)

    def resized(self, capacities: list[int], goals: list[int] | None, used: int) -> RaggedSlots:
        # slots of each head that queries attend to; an evicting head's are all in use once it is at its budget
        filled = self.offsets.filled if goals is None else list(map(min, capacities, goals))
        new = HeadOffsets(capacities, filled, self.keys.device)
        return RaggedSlots(*self.each(lambda t: self.offsets.move(t, new)), new, self.codecs)

    def map_rows(self, change: Callable[[Tensor], Tensor], B: int, H: int) -> RaggedSlots:
        heads_BH = torch.arange(B * H, device=self.keys.device).view(B, H)  # numbered, to be changed as rows are
        offsets, rows = self.offsets.select_heads(change(heads_BH).reshape(-1))
        return RaggedSlots(*self.each(lambda t: t[rows]), offsets, map_centre(self.codecs, change))

    def make_dense(self, B: int, H: int) -> DenseSlots:
        return DenseSlots(*self.each(lambda t: self.offsets.unpack_entries(t, B, H)), self.codecs)


# ---- constructors ----


def nothing() -> DenseSlots:
    """Make the slots of a layer that has read no text."""
    return DenseSlots(torch.empty(0, 0, 0, 0, device="cpu"), torch.empty(0, 0, 0, 0, device="cpu"))


def empty(like: Slots, B: int, H: int, layout: Layout, centre_BH1D: Tensor | None) -> Slots:
    """Make slots of zeros for B * H heads, to move tokens into. Sizes follow `layout`, which may differ by head (ragged).

    `_make_buffers` calls it as caches are joined, `pack` as a layer's tokens move. like: slots whose dtype, device, head sizes
    and bits the new ones get. centre_BH1D: what keys of 8 or 4 bits are rounded around; None for 16 bits.
    """
    codecs = centre_codecs(like.codecs, centre_BH1D)

    def zeros(*rows: int) -> tuple[Tensor, Tensor]:
        return like.each(lambda t: t.new_zeros(*rows, t.shape[-1]))

    if layout.filled is None:
        return DenseSlots(*zeros(B, H, max(layout.capacities)), codecs)
    offsets = HeadOffsets(layout.capacities, layout.filled, like.keys.device)
    keys, values = zeros(offsets.rows)
    return RaggedSlots(keys, values, offsets, codecs)


def restore_slots(keys: Tensor, values: Tensor, described: Any, codecs: Codecs) -> Slots:
    """Return the slots of a layer of a loaded cache, which hold these stored keys and values.

    described: None if slots are dense; if ragged, a list of each head's slots, and one of how many of them are filled.
    """
    if described is None:
        return DenseSlots(keys, values, codecs)
    return RaggedSlots(keys, values, HeadOffsets(described[0], described[1], keys.device), codecs)


def gather_entries(tensor: Tensor, index_BHK: Tensor) -> Tensor:
    """[B,H,T,...] -> [B,H,K,...]: gather each head's entries at slots `index_BHK`, such as those of kept tokens."""
    if tensor.ndim == 3:
        return tensor.gather(2, index_BHK)
    b, h = (torch.arange(n, device=tensor.device) for n in index_BHK.shape[:2])
    return tensor[b[:, None, None], h[None, :, None], index_BHK]


def collect_entries(tensor: Tensor, index_BHK: Tensor, columns: int, empty: int) -> Tensor:
    """[B,H,T,...] -> [B,H,columns,...]: copy the entries at `index_BHK` to new buffers, padded with `empty`; for `allocate`."""
    (B, H, K), rest = index_BHK.shape, tensor.shape[3:]
    new = tensor.new_empty(B, H, columns, *rest)
    torch.gather(tensor, 2, index_BHK.view(B, H, K, *(1 for _ in rest)).expand(B, H, K, *rest), out=new[:, :, :K])
    return _clear_from(new, K, empty)


def fit_columns(tensor: Tensor, columns: int, empty: int) -> Tensor:
    """[B,H,K,...] -> [B,H,columns,...]: copy to new buffers of so many columns; the tensor is cut, or padded with `empty`."""
    B, H, K, *rest = tensor.shape
    new = tensor.new_empty(B, H, columns, *rest)
    new[:, :, :K] = tensor[:, :, :columns]
    return _clear_from(new, K, empty)


def _clear_from(tensor: Tensor, used: int, empty: int) -> Tensor:
    """For `collect_entries` and `fit_columns`: fill columns from `used` on with `empty`, in place; return the buffers."""
    if used < tensor.shape[2]:
        tensor[:, :, used:].fill_(empty)
    return tensor
