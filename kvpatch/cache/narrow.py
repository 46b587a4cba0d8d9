"""Slots of a prompt whose tokens are going to be rounded: its own attention reads them in full.

A pass appends its keys and values unrounded and attends to them so. When the prompt (or block) ends, the kept tokens are
rounded once; tokens of earlier prompts keep their bytes. The end of the first prompt fixes the centre of each head's keys for
good.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.entries import FULL, Codecs, Latent, centre_codecs, centre_of, codecs, find_midrange, in_full
from .growth import Layout
from .slots import DenseSlots, Slots, gather_entries


class ReadingSlots(DenseSlots):
    """Columns [B,H,C,D] of a prompt, unrounded. packed: entries of the first columns, as earlier prompts' ends rounded them.

    rounding: the codecs by which this prompt's end rounds the rest.
    """

    by_row = ("stored", "rounding", "packed")

    def __init__(self, keys: Tensor, values: Tensor, rounding: Codecs, packed: tuple[Tensor, ...]) -> None:
        super().__init__(keys, values, in_full(rounding))
        self.rounding, self.packed = rounding, packed

    @property
    def centre(self) -> Tensor | None:
        return centre_of(self.rounding)

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(t.numel() for t in self.packed)

    def fix_centre(self, positions_BHT: Tensor) -> None:
        """Set the centre that keys are rounded around, from the columns of the prompt (or block) that ends.

        `SlotLayer.allocate` and `SlotLayer.round` call this before they drop or round columns. Rows that hold tokens of earlier
        prompts keep their centre. positions_BHT: of the used columns, -1 for padding.
        """
        # packed: the columns that were rounded before, of earlier prompts
        old_centre, W, T = self.centre, self.packed[0].shape[2], positions_BHT.shape[2]  # columns W to T are this prompt's
        real_BHT = positions_BHT >= 0
        if W < T:
            centre = find_midrange(self.keys[:, :, W:T].detach(), real_BHT[:, :, W:])
            if old_centre is not None:  # a row keeps its centre if it holds earlier tokens, not only padding
                centre = torch.where(real_BHT[:, :, :W].flatten(1).any(1)[:, None, None, None], old_centre, centre)
            self.rounding = centre_codecs(self.rounding, centre)

    def append(self, start: int, k_BHQD: Tensor, v_BHQD: Tensor) -> None:
        super().append(start, k_BHQD, v_BHQD)
        self.packed = tuple(t[:, :, :start] for t in self.packed)  # crop() may have taken back rounded columns: drop these

    def close_columns(self, used: int) -> DenseSlots:
        every = torch.arange(used, device=self.keys.device)
        return self._round_entries(every.expand(*self.keys.shape[:2], used))

    def move_to_front(self, index_BHK: Tensor, kept_BHK: Tensor | None, layout: Layout) -> Slots:
        every = torch.arange(index_BHK.shape[-1], device=index_BHK.device).expand_as(index_BHK)
        return self._round_entries(index_BHK).move_to_front(every, kept_BHK, layout)

    def _round_entries(self, index_BHK: Tensor) -> DenseSlots:
        """Return slots with the columns at `index_BHK`, rounded, as a prompt ends; those in `packed` were rounded before."""
        entries = []
        assert self.centre is not None, "the layer calls fix_centre() before it closes or moves columns"
        # keys, then values, which latent attention does not store
        for unrounded, packed, codec in zip(self.stored, self.packed, self.rounding, strict=False):
            assert not isinstance(codec, Latent), "nothing is stored for values in their keys"
            new, n_packed = codec.encode(gather_entries(unrounded, index_BHK)), packed.shape[2]
            # columns of earlier prompts keep their rounded numbers
            if n_packed:  # rounding twice would lose more
                old = gather_entries(packed, index_BHK.clamp(max=n_packed - 1))
                new = torch.where((index_BHK < n_packed)[..., None], old, new)
            entries.append(new)
        return DenseSlots(entries[0], entries[-1], self.rounding)


def make_prompt_slots(keys: Tensor, values: Tensor, bits: int, latent: bool) -> DenseSlots:
    """Make the slots of a first prompt from its columns [B,H,C,D]; if bits < 16, they are rounded where it ends.

    `SlotLayer._make_slots` calls it. latent: values are a part of their keys, and not stored.
    """
    rounding = codecs(bits, keys.shape[-1], values.shape[-1], keys.dtype, latent)
    if bits == FULL:
        return DenseSlots(keys, values, rounding)
    none = rounding[0].encode(keys[:, :, :0])
    packed = (none,) if isinstance(rounding[1], Latent) else (none, rounding[1].encode(values[:, :, :0]))
    return ReadingSlots(keys, values, rounding, packed)


def open_slots(slots: Slots) -> Slots:
    """For `begin_prompt`: return slots that a prompt is appended to in full precision; rounded ones are unpacked."""
    if all(codec.exact for codec in slots.codecs):
        return slots.move_to_buffers()
    keys, values = slots.numbers(slots.width)
    return ReadingSlots(keys, values, slots.codecs, slots.stored)
