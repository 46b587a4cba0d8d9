"""Slots in the pages of an engine: a row of a batch has pages of its own, and its tokens stay there while rows come and go.

An engine (vLLM) allocates one tensor per layer, [N,H,2,P,D]: N pages, each with keys and values of H heads in P slots. An entry
of a page may be another token in every head and layer. Positions and scores are the layer's, beside the pages. A prompt is read
in memory of its own; what is kept of it goes to the pages where the prompt, or a chunk of it, ends.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.entries import EXACT
from ..backends.protocol import Memory
from .growth import Layout
from .slots import DenseSlots, Slots, fitted, gather_entries


class PagedSlots(DenseSlots):
    """The first columns, `shape[2]`, of the pages of each row.

    Kernels read and write them where they are, and so does torch if each row has one page, and these lie one behind the
    other. Else they are copied for torch at every step, each page once.

    pool: [N,H,2,P,D]. table_BN: pages of each row, in order; then page 0, which is nobody's, in rows with fewer than others.
    """

    appends = in_place = False
    by_row = ("table_BN",)  # rows can be selected and ordered, but not copied

    def __init__(self, pool: Tensor, table_BN: Tensor, width: int) -> None:
        P = pool.shape[3]
        assert width <= table_BN.shape[1] * P, "an engine gives a request pages for all that it will ever hold"
        self.pool, self.table_BN, self.codecs = pool, table_BN, EXACT
        self._width = width

    @property
    def shape(self) -> tuple[int, ...]:
        _, H, _, _, D = self.pool.shape
        return len(self.table_BN), H, self._width, D

    @property
    def sizes(self) -> tuple[int, int]:
        return self.pool.shape[-1], self.pool.shape[-1]

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        return self._read_pages(0, self.width)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self._read_pages(1, self.width)

    def _read_pages(self, which: int, used: int) -> Tensor:
        _, H, _, P, D = self.pool.shape
        if used <= P:
            ours = self.pool[:, :, which, :used]
            return ours.index_select(0, self.table_BN[:, 0]) if self._adjacent_pages is None else ours[self._adjacent_pages]
        B, N = len(self.table_BN), -(-used // P)
        pages = self.pool[:, :, which].index_select(0, self.table_BN[:, :N].flatten())
        return pages.view(B, N, H, P, D).transpose(1, 2).reshape(B, H, N * P, D)[:, :, :used]

    @functools.cached_property
    def _adjacent_pages(self) -> slice | None:
        """The rows' first pages, if they lie one behind the other."""
        first = self.table_BN[:, 0].tolist()
        here = range(first[0], first[0] + len(first))
        return slice(here.start, here.stop) if first == [*here] else None

    @property
    def nbytes(self) -> int:
        return self.table_BN.numel() * self.pool[0].numel() * self.pool.element_size()

    def view(self, used: int) -> tuple[Tensor, Tensor]:
        return self._read_pages(0, used), self._read_pages(1, used)

    def outline_view(self, used: int) -> tuple[Tensor, Tensor]:
        B, H, _, D = self.shape
        some = self.pool[:1, :, 0, :1].expand(B, H, used, D)
        return some, some

    # ---- entries, by their row of the flattened pool; a value lies P rows behind its key ----

    def locate_entries(self) -> Memory:
        return self._pool_memory

    @functools.cached_property
    def _pool_memory(self) -> Memory:
        """The pool's own entries, and where those of each head's pages begin."""
        P, (B, H, C, _) = self.pool.shape[3], self.shape
        heads, (flat, behind) = torch.arange(H, device=self.pool.device), self._flatten_pool()
        begin_BHM = (self.table_BN[:, None, : -(-C // P)] * H + heads[:, None]) * 2 * P
        one = C <= P
        return Memory(flat, flat[behind:], begin_BHM.reshape(B * H, *(() if one else (-1,))), None, None if one else P)

    def find_begins(self) -> Tensor:
        B, H, _, _ = self.shape
        return self.rows(self.table_BN.new_zeros(B, H), self.table_BN)

    def rows(self, slot_BH: Tensor, flat_N: Tensor) -> Tensor:
        H, P = self.pool.shape[1], self.pool.shape[3]
        page_BH = self.table_BN.gather(1, slot_BH // P) if self.table_BN.shape[1] > 1 else self.table_BN
        heads = torch.arange(H, device=slot_BH.device)
        return ((page_BH * H + heads) * 2 * P + slot_BH % P).flatten()

    def _flatten_pool(self) -> tuple[Tensor, int]:
        P, D = self.pool.shape[3:]
        return self.pool.view(-1, D), P

    def read_at(self, rows_N: Tensor) -> tuple[Tensor, Tensor]:
        flat, behind = self._flatten_pool()
        return flat[rows_N], flat[rows_N + behind]

    def write_at(self, rows_N: Tensor, k: Tensor, v: Tensor) -> None:
        flat, behind = self._flatten_pool()
        flat.index_copy_(0, rows_N, k.reshape(-1, flat.shape[1]))
        flat.index_copy_(0, rows_N + behind, v.reshape(-1, flat.shape[1]))

    def append(self, start: int, k_BHQD: Tensor, v_BHQD: Tensor) -> None:
        for column in range(k_BHQD.shape[2]):
            slot_BH = self.table_BN.new_full(self.shape[:2], start + column)
            self.write_at(self.rows(slot_BH, slot_BH), k_BHQD[:, :, column].detach(), v_BHQD[:, :, column].detach())

    # ---- moving slots ----

    def move_to_buffers(self) -> PromptSlots:
        keys, values = (columns.clone() for columns in self.view(self.width))
        return PromptSlots(keys, values, self.pool, self.table_BN)

    def beside(self, others: list[Slots], width: int) -> PagedSlots | None:
        tables = [self.table_BN, *(other.table_BN for other in others if isinstance(other, PagedSlots))]
        if len(tables) <= len(others):
            return None
        most = max(table_BN.shape[1] for table_BN in tables)
        table_BN = torch.cat([F.pad(table_BN, (0, most - table_BN.shape[1])) for table_BN in tables])
        return PagedSlots(self.pool, table_BN, max(width, self.width, *(other.width for other in others)))

    def resized(self, capacities: list[int], goals: list[int] | None, used: int) -> PagedSlots:
        return PagedSlots(self.pool, self.table_BN, max(capacities))

    def move_to_front(self, index_BHK: Tensor, kept_BHK: Tensor | None, layout: Layout) -> Slots:
        return self.move_to_buffers().move_to_front(index_BHK, kept_BHK, layout)

    def __copy__(self) -> PagedSlots:
        """Return slots in the same pages, which have looked nothing up yet."""
        return PagedSlots(self.pool, self.table_BN, self.width)


class PromptSlots(DenseSlots):
    """Columns [B,H,C,D] of a prompt, in memory of their own; then, what is kept of them goes to these pages."""

    by_row = ("stored", "table_BN")

    def __init__(self, keys: Tensor, values: Tensor, pool: Tensor, table_BN: Tensor) -> None:
        super().__init__(keys, values)
        self.pool, self.table_BN = pool, table_BN

    def close_columns(self, used: int) -> PagedSlots:
        return self._store_columns(self.keys[:, :, :used], self.values[:, :, :used], used)

    def move_to_front(self, index_BHK: Tensor, kept_BHK: Tensor | None, layout: Layout) -> PagedSlots:
        width = max(*layout.capacities, index_BHK.shape[-1])
        return self._store_columns(gather_entries(self.keys, index_BHK), gather_entries(self.values, index_BHK), width)

    def _store_columns(self, k_BHKD: Tensor, v_BHKD: Tensor, width: int) -> PagedSlots:
        """Write columns to the pages, and zeros to the rest of the last one."""
        B, H, _, D = k_BHKD.shape
        P = self.pool.shape[3]
        N = -(-width // P)
        columns = torch.stack([fitted(k_BHKD, N * P, 0), fitted(v_BHKD, N * P, 0)], 2)
        pages = columns.view(B, H, 2, N, P, D).permute(0, 3, 1, 2, 4, 5).flatten(0, 1)
        self.pool[self.table_BN[:, :N].flatten()] = pages
        return PagedSlots(self.pool, self.table_BN, width)


def first_prompt(keys: Tensor, values: Tensor, pool: Tensor, table_BN: Tensor) -> PromptSlots:
    """Make the slots of a new row's prompt. Its pages are emptied: what an earlier row left there may be infinite."""
    pool[table_BN.flatten()] = 0
    return PromptSlots(keys, values, pool, table_BN)
