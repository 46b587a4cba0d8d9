"""Heads that hold different numbers of tokens: flat keys and values in which every head has a segment of its own.

Keys and values are entries [F,D]; R is the sum of what the heads hold and of the free slots that each head needs. Dense slots
[B,H,C,D] are the case of equal segments, and they stay a layout of their own, since everything but attention and the write is
the same for both: positions and scores are kept as [B,H,C], C the longest head, with -1 behind a head's own end. (They
are 8 to 24 bytes a token beside the 256 to 1024 of a key and a value; padding these alone keeps one set of score, scope and
selection functions for all layers.) Pages were the alternative: they spare the copy when a layer that does not evict outgrows
its slack, at the price of an index per page in every attention call and of half a page per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FEW = 64  # heads; of more, capacities are rounded up, so that many heads make few runs
WASTE = 50  # by a fiftieth of their mean at most
SPARE = 50  # a layer becomes ragged where dense slots would waste more than a fiftieth


@dataclass
class Run:
    """Heads (of the flattened B*H) of one capacity whose segments follow each other from row `begin` on.

    filled: slots that each of them had in use when the head_offsets were made; None where they differ.
    """

    heads: Tensor | slice
    count: int
    begin: int
    capacity: int
    filled: int | None

    def of(self, entries_FD: Tensor) -> Tensor:
        """The run's part of flat keys or values, as a view [heads, capacity, D]."""
        return entries_FD[self.begin : self.begin + self.count * self.capacity].view(self.count, self.capacity, -1)


def wasteful(needs: list[int], least: int = 0) -> bool:
    """Tell if dense slots for heads that need so many would waste too much: never where it is `least` slots a head or fewer."""
    waste = max(needs) * len(needs) - sum(needs)
    return waste * SPARE > sum(needs) and waste > least * len(needs)


class HeadOffsets:
    """Where the slots of each head lie.

    capacities: slots of each head of the flattened B*H, rounded up where there are many heads unless `exactly`. filled:
    slots in use; while decoding all heads grow alike, or none does.
    """

    def __init__(self, capacities: list[int], filled: list[int], device: torch.device, exactly: bool = False) -> None:
        many = len(capacities) > FEW and not exactly
        step = max(sum(capacities) // (WASTE * len(capacities)), 1) if many else 1
        self.capacities, self.filled = [-(-capacity // step) * step for capacity in capacities], filled
        self.width = max(self.capacities)
        self.runs: list[Run] = []
        begins, row = [0] * len(capacities), 0
        for capacity in sorted(set(self.capacities)):
            heads = [n for n, own in enumerate(self.capacities) if own == capacity]
            used = {filled[n] for n in heads}
            adjacent = heads[-1] - heads[0] + 1 == len(heads)
            index = slice(heads[0], heads[-1] + 1) if adjacent else torch.tensor(heads, device=device)
            self.runs.append(Run(index, len(heads), row, capacity, used.pop() if len(used) == 1 else None))
            for n in heads:
                begins[n], row = row, row + capacity
        self.rows = row
        self.begin_N = torch.tensor(begins, device=device)
        self.capacity_N = torch.tensor(self.capacities, device=device)
        # whether some slots must be masked, whatever the geometry
        self.uneven = any(run.filled is None for run in self.runs)
        self._sequences: tuple[Tensor, Tensor, Tensor] | None = None
        self._places: tuple[Tensor, Tensor] | None = None

    def places(self) -> tuple[Tensor, Tensor]:
        """Head and column of every row, [R] each."""
        if self._places is None:
            device = self.begin_N.device
            lengths = torch.tensor(self.capacities, device=device)
            order = self.begin_N.argsort()
            head = order.repeat_interleave(lengths[order])
            self._places = head, torch.arange(self.rows, device=device) - self.begin_N[head]
        return self._places

    def sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """As a variable-length kernel takes them: heads in the order of their rows [N], where each begins and the last ends
        [N+1] int32, slots in use [N] int32."""
        if self._sequences is None:
            device = self.begin_N.device
            order = self.begin_N.argsort()
            starts = torch.cat([self.begin_N[order], torch.tensor([self.rows], device=device)]).int()
            self._sequences = order, starts, torch.tensor(self.filled, device=device)[order].int()
        return self._sequences

    def pack(self, tensor_BHTD: Tensor, index_BHK: Tensor, kept_BHK: Tensor) -> Tensor:
        """Rows [R,D] with the entries at `index` (where `kept`) of each head at its front; what is free is zero."""
        H, (head, column) = tensor_BHTD.shape[1], self.places()
        at = column.clamp(max=index_BHK.shape[-1] - 1)
        rows = tensor_BHTD[head // H, head % H, index_BHK.flatten(0, 1)[head, at]]
        real = kept_BHK.flatten(0, 1)[head, at] & (column == at)
        return rows.masked_fill_(~real[:, None], 0)

    def unpack(self, entries_FD: Tensor, B: int, H: int, width: int) -> Tensor:
        """[B,H,width,D], zero behind each head's end."""
        head, column = self.places()
        padded = entries_FD.new_zeros(B * H * width, entries_FD.shape[-1])
        padded[head * width + column] = entries_FD
        return padded.view(B, H, width, -1)

    def select(self, heads_N: Tensor) -> tuple[HeadOffsets, Tensor]:
        """The head_offsets of these heads, in this order and repeatedly where asked, and the rows [R'] to take for them."""
        mine = heads_N.tolist()
        new = HeadOffsets([self.capacities[n] for n in mine], [self.filled[n] for n in mine], heads_N.device, exactly=True)
        head, column = new.places()
        return new, self.begin_N[heads_N[head]] + column

    def resized(self, capacities: list[int], filled: list[int]) -> HeadOffsets:
        """The head_offsets of the same heads with other capacities."""
        return HeadOffsets(capacities, filled, self.begin_N.device, exactly=True)

    def move(self, entries_FD: Tensor, new: HeadOffsets) -> Tensor:
        """The rows in the segments of `new`, whose heads are the same; what finds no room there was empty."""
        head, column = self.places()
        stays = column < new.capacity_N[head]
        moved = entries_FD.new_zeros(new.rows, entries_FD.shape[-1])
        moved[(new.begin_N[head] + column)[stays]] = entries_FD[stays]
        return moved
