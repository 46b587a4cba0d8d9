"""Head offsets: flat storage of keys and values in which every head has a segment of its own length.

Keys and values are entries [F,D], where F is the sum of the heads' capacities: the tokens that each holds and its free slots.
Positions and scores stay dense, [B,H,C] with C the longest segment and -1 behind a head's end, so that one set of score,
scope and selection functions serves all layers. They take 8 to 24 bytes per token; a key and a value take 256 to 1024.

Pages would avoid the copy when a layer that does not evict outgrows its free slots, but they cost an index per page in every
attention call and half a page per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from einops import rearrange
from torch import Tensor

SPARE = 50  # a layer becomes ragged if dense slots would waste more than 1/50
BLOCK = 64  # entries of a block


@dataclass(frozen=True)
class Blocks:
    """Flat entries cut into blocks, so that the products of all heads are one batched matrix product.

    Blocks take no notice of where segments end: a product is computed for every head of its block, and one is used.

    Attributes:
        parts: blocks of one size each: first and last entry + 1, entries of a block.
        M: heads that a block has entries of, at most.
        head_R: the heads of each block, int64, M a block.
        at_S: where the product of each dense slot is among those of all blocks, int32 [N * width]; 0 behind a head's end.
        own: bool, of all these products: whether the entry is the head's own.
    """

    parts: list[tuple[int, int, int]]
    M: int
    head_R: Tensor
    at_S: Tensor
    own: Tensor


def wasteful(needs: list[int], least: int = 0) -> bool:
    """Tell whether dense slots would waste too much for heads that need these numbers of slots.

    Wasting at most `least` slots per head is never too much.
    """
    waste = max(needs) * len(needs) - sum(needs)
    return waste * SPARE > sum(needs) and waste > least * len(needs)


class HeadOffsets:
    """Offsets of each head's segment in flat storage.

    Args:
        capacities: slots of each head of the flattened B*H.
        filled: slots in use in each head.
        device: device of the offset tensors.

    Attributes:
        width: slots of the longest segment.
        rows: F, entries in all.
        begin_N: first entry of each head, int64.
        capacity_N: slots of each head, int64.
        slot_F: the slot of each entry in dense slots of this width, head * width + column, int32.
    """

    def __init__(self, capacities: list[int], filled: list[int], device: torch.device) -> None:
        self.capacities, self.filled = capacities, filled
        self.width, self.rows = max(capacities), sum(capacities)
        order = sorted(range(len(capacities)), key=capacities.__getitem__)
        begins = dict(zip(order, accumulate((capacities[n] for n in order), initial=0), strict=False))
        self.begin_N = torch.tensor([begins[n] for n in range(len(capacities))], device=device)
        self.capacity_N = torch.tensor(capacities, device=device)
        self.order = torch.tensor(order, device=device)
        head = self.order.repeat_interleave(self.capacity_N[self.order])
        column = torch.arange(self.rows, device=device) - self.begin_N[head]
        self.slot_F = (head * self.width + column).int()
        self._sequences: tuple[Tensor, Tensor, Tensor] | None = None
        self._blocks: Blocks | None = None

    def places(self) -> tuple[Tensor, Tensor]:
        """Return head and column of every entry, int64 [F] each."""
        slot = self.slot_F.long()
        return slot // self.width, slot % self.width

    def blocks(self) -> Blocks:
        """Return the blocks of the entries."""
        if self._blocks is None:
            self._blocks = self._cut()
        return self._blocks

    def _cut(self) -> Blocks:
        F, N, device = self.rows, len(self.capacities), self.begin_N.device
        whole = F - F % BLOCK
        rank = torch.arange(N, device=device).repeat_interleave(self.capacity_N[self.order])  # of each entry's head
        first, last = rank[::BLOCK], torch.cat([rank[BLOCK - 1 :: BLOCK], rank[-1:]])
        M = int((last[: len(first)] - first).max()) + 1
        entry = torch.arange(F, device=device)
        block, size = entry // BLOCK, torch.where(entry < whole, BLOCK, F % BLOCK)
        at = block * (M * BLOCK) + (rank - first[block]) * size + entry % BLOCK
        at_S = torch.zeros(N * self.width, dtype=torch.int32, device=device)
        at_S[self.slot_F.long()] = at.int()
        own = torch.zeros(F * M, dtype=torch.bool, device=device)
        own[at] = True
        head_R = self.order[(first[:, None] + torch.arange(M, device=device)).clamp(max=N - 1)].flatten()
        parts = [(0, whole, BLOCK), (whole, F, F - whole)]
        return Blocks([part for part in parts if part[0] < part[1]], M, head_R, at_S, own)

    def products(self, q_NGD: Tensor, k_FD: Tensor) -> Tensor:
        """Return the products of each head's queries with its entries [N,G,width]; behind a head's end anything finite."""
        blocks, (N, G, D) = self.blocks(), q_NGD.shape
        parts, row = [], 0
        for start, stop, size in blocks.parts:
            P = (stop - start) // size
            q = q_NGD.index_select(0, blocks.head_R[row : row + P * blocks.M]).view(P, blocks.M * G, D)
            x = torch.bmm(q, k_FD[start:stop].view(P, size, D).to(q.dtype).transpose(1, 2))
            parts.append(rearrange(x, "p (m g) s -> g (p m s)", g=G))
            row += P * blocks.M
        every = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return every.index_select(1, blocks.at_S).view(G, N, self.width).transpose(0, 1)

    def mixed(self, p_NGT: Tensor, v_FD: Tensor) -> Tensor:
        """Return the values of each head's entries [N,G,D], summed with the weights p."""
        blocks, (N, G, _) = self.blocks(), p_NGT.shape
        w_GF = p_NGT.transpose(0, 1).reshape(G, -1).index_select(1, self.slot_F)
        out, row = p_NGT.new_zeros(N, G, v_FD.shape[-1]), 0
        for start, stop, size in blocks.parts:
            P = (stop - start) // size
            own = blocks.own[start * blocks.M : stop * blocks.M].view(P, blocks.M, 1, size)
            w = rearrange(w_GF[:, start:stop], "g (p s) -> p 1 g s", s=size) * own
            v = v_FD[start:stop].view(P, size, -1).to(w.dtype)
            part = torch.bmm(w.flatten(1, 2), v).view(P * blocks.M, G, -1)
            out = out.index_add(0, blocks.head_R[row : row + P * blocks.M], part)
            row += P * blocks.M
        return out

    def sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the segments in the form that variable-length attention kernels take.

        Returns:
            Heads in the order of their segments, int64 [N]; first entry of each segment and the end of the last, int32 [N+1];
            slots in use, int32 [N].
        """
        if self._sequences is None:
            device = self.begin_N.device
            starts = torch.cat([self.begin_N[self.order], torch.tensor([self.rows], device=device)]).int()
            self._sequences = self.order, starts, torch.tensor(self.filled, device=device)[self.order].int()
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
        new = HeadOffsets([self.capacities[n] for n in mine], [self.filled[n] for n in mine], heads_N.device)
        head, column = new.places()
        return new, self.begin_N[heads_N[head]] + column

    def resized(self, capacities: list[int], filled: list[int]) -> HeadOffsets:
        """Return offsets of the same heads with other capacities."""
        return HeadOffsets(capacities, filled, self.begin_N.device)

    def move(self, entries_FD: Tensor, new: HeadOffsets) -> Tensor:
        """Move entries to the segments of `new`, which has the same heads; entries that do not fit must be free slots."""
        head, column = self.places()
        stays = column < new.capacity_N[head]
        moved = entries_FD.new_zeros(new.rows, entries_FD.shape[-1])
        moved[(new.begin_N[head] + column)[stays]] = entries_FD[stays]
        return moved
