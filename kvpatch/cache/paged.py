"""Slots in the pages of an engine: a row of a batch has pages of its own, and its tokens stay there while rows come and go.

An engine (vLLM) allocates one tensor for a layer and gives pages of it to requests. Here it is [2,S,P,D], keys before values,
in strips of P slots of one head: page n of an engine with H heads is the strips n * H to (n + 1) * H. `divide_pages` gives each
head of a row its strips. If the pages of a row follow each other, so do the strips of each head: its slots are one piece, as if
the row had one large page. An entry of a row may be another token in every head and layer. Positions and scores are the
layer's, beside the pages. A prompt is read in memory of its own; what is kept of it goes to the pages where the prompt, or a
chunk of it, ends.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.entries import EXACT
from ..backends.protocol import Memory
from .growth import Layout
from .slots import DenseSlots, Slots, fit_columns, gather_entries


class Strips(NamedTuple):
    """Strips of each head of each row, in order [B,H,N]; then strip 0, which is nobody's, in rows with fewer than others.

    place_B2: on the host, of each row, how many strips a head has, and the first head's first one where all of the row's
    follow each other, else 0.
    """

    index_BHN: Tensor
    place_B2: Tensor

    @property
    def run(self) -> int:
        """Strips of a head that follow each other in memory, in each row at least so many; 1 if a row's pages are scattered."""
        return min(n if first else 1 for n, first in self.place_B2.tolist())


def divide_pages(pages: Sequence[Sequence[int]], heads: int, device: torch.device) -> Strips:
    """Divide the pages that an engine gave each row, as numbers, among the row's heads, as new requests begin.

    `Requests._divide_pages` calls it. Returns for each head its strips (the slots of one page for one head), and for each row
    how many a head has and where they begin if they follow each other in memory.
    """
    # page n is `heads` strips, n * heads and those after it, one for each head. If a row's pages follow each other, each head
    # gets consecutive strips of this memory; else its strip of each page
    # N: strips of a head
    index_BHN, h_H1 = (
        torch.zeros(len(pages), heads, max(map(len, pages)), dtype=torch.long, device="cpu"),
        torch.arange(heads, device="cpu")[:, None],
    )
    spans = []
    for row, numbers in enumerate(pages):
        n, first = len(numbers), numbers[0]
        follow = [*numbers] == [*range(first, first + n)]
        index_BHN[row, :, :n] = (
            first * heads + h_H1 * n + torch.arange(n, device="cpu")
            if follow
            else torch.tensor(numbers, device="cpu") * heads + h_H1
        )
        spans.append((n, first * heads if follow else 0))
    host = index_BHN.pin_memory() if device.type == "cuda" else index_BHN
    return Strips(host.to(device, non_blocking=True), torch.tensor(spans, device="cpu"))


class PagedSlots(DenseSlots):
    """The first columns, `shape[2]`, of the strips of each row's heads. A strip is a page of one head.

    Kernels read and write them where they are, and so does torch if the strips of all rows follow each other. Else
    they are copied for torch at every step.

    pool: [2,S,P,D], the engine's memory: keys and then values, in S strips of P slots.
    """

    appends = in_place = False
    by_row = ("strips_BHN", "place_B2")  # rows can be selected and ordered, but not copied

    def __init__(self, pool: Tensor, strips: Strips, width: int) -> None:
        self.pool, self.codecs, self._width = pool, EXACT, width
        self.strips_BHN, self.place_B2 = strips
        assert width <= self.strips_BHN.shape[2] * pool.shape[2], "a request has pages for all that it will ever hold"

    @property
    def strips(self) -> Strips:
        return Strips(self.strips_BHN, self.place_B2)

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.strips_BHN.shape[:2], self._width, self.pool.shape[3]

    @property
    def sizes(self) -> tuple[int, int]:
        return self.pool.shape[3], self.pool.shape[3]

    @functools.cached_property
    def most(self) -> int:
        """Slots of the row that has most pages: no row ever needs more."""
        return int(self.place_B2[:, 0].max()) * self.pool.shape[2]

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        return self._read_strips(0, self.width)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self._read_strips(1, self.width)

    def _read_strips(self, which: int, used: int) -> Tensor:
        """Return heads' first `used` keys (which=0) or values (1) [B,H,used,D], from strips (pages of one head), for torch.

        `keys`, `values` and `view` return it: a view of the pool if all strips follow each other (`_together`), else a copy.
        """
        (B, H, _), (_, _, P, D) = self.strips_BHN.shape, self.pool.shape
        if self._together is not None and used <= self.most:  # one slice of the pool
            return self.pool[which, self._together].view(B, H, -1, D)[:, :, :used]
        # strips that hold the first `used` slots, of P slots each
        needed_BHM = self.strips_BHN[:, :, : -(-used // P)]
        return self.pool[which].index_select(0, needed_BHM.flatten()).view(B, H, -1, D)[:, :, :used]

    @functools.cached_property
    def _together(self) -> slice | None:
        """The strips (pages of one head) of all rows in the pool, if they follow each other; for `_read_strips`."""
        heads, (n, first) = self.strips_BHN.shape[1], self.place_B2[0].tolist()  # strips of a head, and where they begin
        begins = range(first, first + len(self.place_B2) * n * heads, n * heads)
        follow = first > 0 and self.place_B2.tolist() == [[n, begin] for begin in begins]
        return slice(first, begins.stop) if follow else None

    @property
    def nbytes(self) -> int:
        strips = int(self.place_B2[:, 0].sum()) * self.shape[1]  # without those that fill up shorter rows
        return strips * 2 * self.pool[0, 0].numel() * self.pool.element_size()

    def view(self, used: int) -> tuple[Tensor, Tensor]:
        return self._read_strips(0, used), self._read_strips(1, used)

    def outline_view(self, used: int) -> tuple[Tensor, Tensor]:
        B, H, _, D = self.shape
        some = self.pool[0, :1, :1].expand(B, H, used, D)  # one entry in every place, without a copy
        return some, some

    # ---- entries, by their row of the flattened pool ----

    def locate_entries(self) -> Memory:
        return self._pool_memory

    @functools.cached_property
    def _pool_memory(self) -> Memory:
        """Addresses for kernels: the entries of the pool, and the first one of each head's run of strips, or of each strip.

        A strip is a page of one head; a run is strips that follow each other in memory. `locate_entries` returns it.
        """
        P, C = self.pool.shape[2], self.width
        # one address for each head if its slots are one piece of memory, else one for each strip of P slots
        if C <= self.strips.run * P:
            return Memory(*self.flat(), self.find_begins())
        return Memory(*self.flat(), self.strips_BHN[:, :, : -(-C // P)].flatten(0, 1) * P, None, P)

    def find_begins(self) -> Tensor:
        return self.strips_BHN[:, :, 0].flatten() * self.pool.shape[2]

    def rows(self, slot_BH: Tensor, flat_N: Tensor) -> Tensor:
        return self.rows_of(slot_BH[..., None])

    def rows_of(self, column_BHM: Tensor) -> Tensor:
        P = self.pool.shape[2]
        return (self.strips_BHN.gather(2, column_BHM // P) * P + column_BHM % P).flatten()

    def flat(self) -> tuple[Tensor, Tensor]:
        D = self.pool.shape[3]
        return self.pool[0].view(-1, D), self.pool[1].view(-1, D)

    def write_at(self, rows_N: Tensor, k: Tensor, v: Tensor) -> None:
        for held, entries in zip(self.flat(), (k, v), strict=True):
            held.index_copy_(0, rows_N, entries.reshape(-1, held.shape[1]))

    def append(self, start: int, k_BHQD: Tensor, v_BHQD: Tensor) -> None:
        columns = torch.arange(start, start + k_BHQD.shape[2], device=self.strips_BHN.device)
        self.write_at(self.rows_of(columns.expand(k_BHQD.shape[:3])), k_BHQD.detach(), v_BHQD.detach())

    # ---- sizes ----

    def plan_slots(self, counts: list[int], goals: list[int] | None, ahead: int) -> list[int]:
        return [min(planned, self.most) for planned in super().plan_slots(counts, goals, ahead)]

    # ---- moving slots ----

    def move_to_buffers(self) -> PromptSlots:
        keys, values = (columns.clone() for columns in self.view(self.width))
        return PromptSlots(keys, values, self.pool, self.strips)

    def join_in_place(self, others: list[Slots], width: int) -> PagedSlots | None:
        """For `_join_layer`: return slots in the pages of these rows and `others`, uncopied; None if some are not in pages."""
        parts = [self, *(other for other in others if isinstance(other, PagedSlots))]
        if len(parts) <= len(others):
            return None
        # N: strips of a head in the row with the most; shorter rows are filled up with strip 0, which is nobody's
        most_slots = max(part.most for part in parts)
        N = most_slots // self.pool.shape[2]
        index_BHN = torch.cat([F.pad(part.strips_BHN, (0, max(N - part.strips_BHN.shape[2], 0)))[:, :, :N] for part in parts])
        # place_B2: strips of a head, and where they begin if they follow each other; width: slots in use
        strips = Strips(index_BHN, torch.cat([part.place_B2 for part in parts]))
        return PagedSlots(self.pool, strips, min(max(width, *(part.width for part in parts)), most_slots))

    def resized(self, capacities: list[int], goals: list[int] | None, used: int) -> PagedSlots:
        return PagedSlots(self.pool, self.strips, min(max(capacities), self.most))

    def move_to_front(self, index_BHK: Tensor, kept_BHK: Tensor | None, layout: Layout) -> Slots:
        return self.move_to_buffers().move_to_front(index_BHK, kept_BHK, layout)

    def __copy__(self) -> PagedSlots:
        """Return slots in the same pages, which have looked nothing up yet."""
        return PagedSlots(self.pool, self.strips, self.width)


class PromptSlots(DenseSlots):
    """Columns [B,H,C,D] of a prompt, in memory of their own; its end moves the kept ones to the engine's pages (`strips`)."""

    by_row = ("stored", "strips_BHN", "place_B2")

    def __init__(self, keys: Tensor, values: Tensor, pool: Tensor, strips: Strips) -> None:
        super().__init__(keys, values)
        self.pool, (self.strips_BHN, self.place_B2) = pool, strips

    def close_columns(self, used: int) -> PagedSlots:
        return self._store_columns(self.keys[:, :, :used], self.values[:, :, :used], used)

    def move_to_front(self, index_BHK: Tensor, kept_BHK: Tensor | None, layout: Layout) -> PagedSlots:
        width = max(*layout.capacities, index_BHK.shape[-1])
        return self._store_columns(gather_entries(self.keys, index_BHK), gather_entries(self.values, index_BHK), width)

    def _store_columns(self, k_BHKD: Tensor, v_BHKD: Tensor, width: int) -> PagedSlots:
        """Write columns to the rows' strips (a strip is a page of one head), and return their slots in the pages.

        `move_to_front` and `close_columns` call it. The rest of the last strip gets zeros.
        """
        K, (_, _, P, D) = k_BHKD.shape[2], self.pool.shape
        slots = PagedSlots(self.pool, Strips(self.strips_BHN, self.place_B2), max(min(width, self.strips_BHN.shape[2] * P), K))
        N = -(-slots.width // P)  # strips of each head, of P slots each
        strips = self.strips_BHN[:, :, :N].flatten()
        for which, columns_BHKD in enumerate((k_BHKD, v_BHKD)):
            self.pool[which, strips] = fit_columns(columns_BHKD, N * P, 0).view(-1, P, D)
        return slots


def first_prompt(keys: Tensor, values: Tensor, pool: Tensor, strips: Strips) -> PromptSlots:
    """Make the slots of a new row's prompt. Its pages are emptied: what an earlier row left there may be infinite."""
    pool[:, strips.index_BHN.flatten()] = 0
    return PromptSlots(keys, values, pool, strips)
