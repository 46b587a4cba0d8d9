"""Head offsets: flat storage of keys and values in which every head has a segment of its own length.

Keys and values are entries [F,D], where F is the sum of the heads' capacities: the tokens that each holds and its free slots.
Positions and scores stay dense, [B,H,C] with C the longest segment and -1 behind a head's end, so that one set of score,
scope and selection functions serves all layers. They take 8 to 24 bytes per token; a key and a value take 256 to 1024.

Pages would avoid the copy when a layer that does not evict outgrows its free slots, but they cost an index per page in every
attention call and half a page per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..policies.numbers import on_device

FEW = 64  # with more heads, capacities are rounded up, so that heads share capacities and there are fewer runs
WASTE = 50  # rounding adds at most 1/50 of the mean capacity
SPARE = 50  # a layer becomes ragged if dense slots would waste more than 1/50


@dataclass
class Run:
    """Heads of one capacity, with adjacent segments.

    Attributes:
        heads: indices into the flattened B*H.
        count: number of heads.
        begin: first entry of the first segment.
        capacity: slots of each head.
        filled: slots in use in each head when the offsets were made; None if heads differ.
    """

    heads: Tensor | slice
    count: int
    begin: int
    capacity: int
    filled: int | None

    def of(self, entries_FD: Tensor) -> Tensor:
        """Return the run's part of flat keys or values, a view [count, capacity, D]."""
        return entries_FD[self.begin : self.begin + self.count * self.capacity].view(self.count, self.capacity, -1)


def wasteful(needs: list[int], least: int = 0) -> bool:
    """Tell whether dense slots would waste too much for heads that need these numbers of slots.

    Wasting at most `least` slots per head is never too much.
    """
    waste = max(needs) * len(needs) - sum(needs)
    return waste * SPARE > sum(needs) and waste > least * len(needs)


class HeadOffsets:
    """Offsets of each head's segment in flat storage.

    While decoding, either all heads gain one token per step or none does.

    Args:
        capacities: slots of each head of the flattened B*H.
        filled: slots in use in each head.
        device: device of the offset tensors.
        exactly: keep the capacities; else they are rounded up if there are many heads.

    Attributes:
        width: slots of the longest segment.
        runs: heads grouped by capacity.
        rows: F, entries in all.
        begin_N: first entry of each head, int64.
        capacity_N: slots of each head, int64.
        uneven: whether heads of equal capacity differ in use, so that some slots must always be masked.
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
            index = slice(heads[0], heads[-1] + 1) if adjacent else on_device(heads, device)
            self.runs.append(Run(index, len(heads), row, capacity, used.pop() if len(used) == 1 else None))
            for n in heads:
                begins[n], row = row, row + capacity
        self.rows = row
        self.begin_N = on_device(begins, device)
        self.capacity_N = on_device(self.capacities, device)
        self.uneven = any(run.filled is None for run in self.runs)
        self._sequences: tuple[Tensor, Tensor, Tensor] | None = None
        self._places: tuple[Tensor, Tensor] | None = None

    def places(self) -> tuple[Tensor, Tensor]:
        """Return head and column of every entry, int64 [F] each."""
        if self._places is None:
            device = self.begin_N.device
            lengths = on_device(self.capacities, device)
            order = self.begin_N.argsort()
            head = order.repeat_interleave(lengths[order])
            self._places = head, torch.arange(self.rows, device=device) - self.begin_N[head]
        return self._places

    def sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the segments in the form that variable-length attention kernels take.

        Returns:
            Heads in the order of their segments, int64 [N]; first entry of each segment and the end of the last, int32 [N+1];
            slots in use, int32 [N].
        """
        if self._sequences is None:
            device = self.begin_N.device
            order = self.begin_N.argsort()
            starts = torch.cat([self.begin_N[order], on_device([self.rows], device)]).int()
            self._sequences = order, starts, on_device(self.filled, device)[order].int()
        return self._sequences

    def pack(self, tensor_BHTD: Tensor, index_BHK: Tensor, kept_BHK: Tensor) -> Tensor:
        """Gather dense slots into flat entries [F,D].

        Args:
            tensor_BHTD: dense keys or values.
            index_BHK: slots to take for each head, in order; they go to the front of its segment.
            kept_BHK: bool, False for entries of index_BHK to leave out. Free slots are zero.
        """
        H, (head, column) = tensor_BHTD.shape[1], self.places()
        at = column.clamp(max=index_BHK.shape[-1] - 1)
        rows = tensor_BHTD[head // H, head % H, index_BHK.flatten(0, 1)[head, at]]
        real = kept_BHK.flatten(0, 1)[head, at] & (column == at)
        return rows.masked_fill_(~real[:, None], 0)

    def unpack(self, entries_FD: Tensor, B: int, H: int, width: int) -> Tensor:
        """Scatter flat entries into dense slots [B,H,width,D], zero behind each head's end."""
        head, column = self.places()
        padded = entries_FD.new_zeros(B * H * width, entries_FD.shape[-1])
        padded[head * width + column] = entries_FD
        return padded.view(B, H, width, -1)

    def select(self, heads_N: Tensor) -> tuple[HeadOffsets, Tensor]:
        """Return the offsets of the heads `heads_N`, in that order and with repetitions, and the entries to take for them."""
        mine = heads_N.tolist()
        new = HeadOffsets([self.capacities[n] for n in mine], [self.filled[n] for n in mine], heads_N.device, exactly=True)
        head, column = new.places()
        return new, self.begin_N[heads_N[head]] + column

    def resized(self, capacities: list[int], filled: list[int]) -> HeadOffsets:
        """Return offsets of the same heads with other capacities."""
        return HeadOffsets(capacities, filled, self.begin_N.device, exactly=True)

    def move(self, entries_FD: Tensor, new: HeadOffsets) -> Tensor:
        """Move entries to the segments of `new`, which has the same heads; entries that do not fit must be free slots."""
        head, column = self.places()
        stays = column < new.capacity_N[head]
        moved = entries_FD.new_zeros(new.rows, entries_FD.shape[-1])
        moved[(new.begin_N[head] + column)[stays]] = entries_FD[stays]
        return moved
