"""Head offsets: flat storage of keys and values in which every head has a segment of its own length.

Keys and values are entries [F,D], where F is the sum of the heads' capacities: the tokens that each holds and its free slots.
Positions and scores stay dense, [B,H,C] with C the longest segment and -1 past a head's end, so that one set of score,
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

from ..policies.numbers import on_device
from .entries import EXACT, Codec, dot, mix

BLOCK = 32  # entries of a block


@dataclass(frozen=True)
class Blocks:
    """Flat entries cut into blocks, so that the products of all heads are one batched matrix product, and one for the edges.

    No product of a head takes in another head's value, not even with a weight of zero: it may be NaN.

    Attributes:
        whole: entries [0, whole) are cut into blocks of BLOCK.
        head_P: the head of each block's first entry, int64.
        inner: int64, blocks within one head's segment.
        inner_head: the heads of these blocks, int64.
        edge_NE: int64, entries of each head in no such block; where it has fewer than others, its first entry.
        edge_slot_NE: the slots of these entries, int32.
        real_NE: bool, False where a head has fewer such entries than others.
        at_S: the place of each dense slot's product among those of all blocks and then of all edges, int32 [N * width].
    """

    whole: int
    head_P: Tensor
    inner: Tensor
    inner_head: Tensor
    edge_NE: Tensor
    edge_slot_NE: Tensor
    real_NE: Tensor
    at_S: Tensor


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
        """Lay the slots of B*H heads end to end, the shortest head first, when heads get or change their capacities.

        `DenseSlots.move_to_front` and RaggedSlots make one. capacities: slots of each head; filled: slots in use. slot_F: for
        each flat entry, its slot in dense [B*H,width] slots. rows: entries.
        """
        self.capacities, self.filled = capacities, filled
        self.width, self.rows = max(capacities), sum(capacities)
        order = sorted(range(len(capacities)), key=capacities.__getitem__)
        begins = dict(zip(order, accumulate((capacities[n] for n in order), initial=0), strict=False))
        self.begin_N = on_device([begins[n] for n in range(len(capacities))], device)
        self.capacity_N = on_device(capacities, device)
        self.order = on_device(order, device)
        head = self.order.repeat_interleave(self.capacity_N[self.order], output_size=self.rows)
        column = torch.arange(self.rows, device=device) - self.begin_N[head]
        self.slot_F = (head * self.width + column).int()
        self._sequences: tuple[Tensor, Tensor, Tensor] | None = None  # made at the first call of `view_sequences`
        self._blocks: Blocks | None = None

    def places(self) -> tuple[Tensor, Tensor]:
        """Return head and column (place within the head) of every entry, int64 [F] each."""
        slot = self.slot_F.long()
        return slot // self.width, slot % self.width

    def blocks(self) -> Blocks:
        """Return how the flat entries are cut into blocks, for a decode step's products; worked out once, at the first call."""
        if self._blocks is None:
            self._blocks = self._cut_blocks()
        return self._blocks

    def _cut_blocks(self) -> Blocks:
        """Return the entries cut into blocks of BLOCK, those of blocks in which two heads meet (the edges) apart.

        `blocks` calls it once. A decode step multiplies all heads at once, as a batch of equal blocks; edges are gathered by
        head, at most E for each. Pure: returns a new Blocks, whose attributes are explained there.
        """
        # of F entries of N heads, the first n_whole make P whole blocks; head_F: the head of each entry
        F, N, device = self.rows, len(self.capacities), self.begin_N.device
        n_whole, head_F = F - F % BLOCK, self.slot_F.long() // self.width
        # blocks that begin and end in the same head; all entries outside such blocks are edges
        head_P = head_F[:n_whole:BLOCK]
        one_head_P = head_P == head_F[BLOCK - 1 : n_whole : BLOCK]
        is_edge_F = torch.ones(F, dtype=torch.bool, device=device)
        is_edge_F[:n_whole] = ~one_head_P.repeat_interleave(BLOCK)
        edge = is_edge_F.nonzero().flatten()
        # sort the edges by head; rank: the number of an edge among those of its head
        head, order = head_F[edge].sort(stable=True)
        edge, count_N = edge[order], torch.bincount(head, minlength=N)
        rank = torch.arange(len(edge), device=device) - (count_N.cumsum(0) - count_N)[head]
        # a row of edges for each head, filled up with the head's first entry to the length E
        E = max(int(count_N.max()), 1)
        edge_NE = self.begin_N[:, None].repeat(1, E)
        edge_NE[head, rank] = edge
        # the place of each entry's product: those of the blocks come first, then the rows of edges
        product_F = torch.arange(F, device=device)
        product_F[edge] = n_whole + head * E + rank
        product_S = torch.zeros(N * self.width, dtype=torch.int32, device=device)  # the same by dense slot
        product_S[self.slot_F.long()] = product_F.int()
        real_NE = torch.arange(E, device=device) < count_N[:, None]
        inner = one_head_P.nonzero().flatten()
        return Blocks(n_whole, head_P, inner, head_P[inner], edge_NE, self.slot_F[edge_NE], real_NE, product_S)

    def multiply_keys(self, q_NGD: Tensor, k_FD: Tensor, codec: Codec = EXACT[0]) -> Tensor:
        """Return a decode step's logits [N,G,width]: queries times their head's keys. Past a head's last slot: any number.

        `step` of the torch backend calls it for layers whose N heads hold different numbers of tokens. k_FD: the keys of all
        heads, end to end. Changes nothing.
        """
        blocks, (N, G, _) = self.blocks(), q_NGD.shape
        # P blocks of M neighbouring keys, each of one head, and E keys apart for each of N heads (see Blocks)
        inner, edges = self._split_entries(k_FD, codec, q_NGD.dtype)
        codec_P, codec_N = self._split_codecs(codec)  # each with the centres that its heads' keys are rounded around
        x_PGM, x_NGE = dot(q_NGD.index_select(0, blocks.head_P), inner, codec_P), dot(q_NGD, edges, codec_N)
        # join the products, and bring them into the order of dense slots
        products = torch.cat([rearrange(x, "n g m -> g (n m)") for x in (x_PGM, x_NGE)], 1)
        return products.index_select(1, blocks.at_S).view(G, N, self.width).transpose(0, 1)

    def mix_values(self, p_NGT: Tensor, v_FD: Tensor, codec: Codec = EXACT[1]) -> Tensor:
        """Return a decode step's output [N,G,D]: sums of each head's values, weighted by `p`.

        `step` of the torch backend calls it after `multiply_keys`. v_FD: the values of all heads, end to end.
        """
        blocks, p_GS = self.blocks(), p_NGT.transpose(0, 1).flatten(1)
        inner, edges = self._split_entries(v_FD, codec, p_NGT.dtype)
        codec_P, codec_N = self._split_codecs(codec)  # with centres if values are parts of keys (latent attention)
        # weights of the values in P blocks of M, and of the E values apart for each head (see Blocks)
        w_PGM = rearrange(p_GS.index_select(1, self.slot_F[: blocks.whole]), "g (p m) -> p g m", m=BLOCK)
        w_NGE = rearrange(p_GS[:, blocks.edge_slot_NE] * blocks.real_NE, "g n e -> n g e")
        # add the blocks' sums to those of their heads; blocks in which two heads meet are left out
        sums = mix(w_PGM, inner, codec_P, w_PGM.dtype).index_select(0, blocks.inner)
        return mix(w_NGE, edges, codec_N, w_NGE.dtype).index_add(0, blocks.inner_head, sums)

    def _split_codecs(self, codec: Codec) -> tuple[Codec, Codec]:
        """Return the codecs of entries in blocks and of those at heads' edges (see Blocks), for a decode step's products.

        Each has the centres of the heads that own its entries: of every block's head, and of all heads in their order.
        """
        return codec.of(self.blocks().head_P), codec.of(slice(None))

    def _split_entries(self, entries_FD: Tensor, codec: Codec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return entries in blocks [P,BLOCK,D] and those at heads' edges [N,E,D] (see Blocks), for a decode step's products.

        Rounded entries stay bytes; others are converted to `dtype`.
        """
        blocks = self.blocks()
        inner = entries_FD[: blocks.whole].view(-1, BLOCK, entries_FD.shape[-1])
        edges = entries_FD.index_select(0, blocks.edge_NE.flatten()).view(*blocks.edge_NE.shape, entries_FD.shape[-1])
        return (inner.to(dtype), edges.to(dtype)) if codec.exact else (inner, edges)

    def view_sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the segments as flash kernels take sequences of different lengths; built at the first call.

        `ragged_step` asks.

        Returns:
            Heads in the order of their segments, int64 [N]; first entry of each segment and the end of the last, int32 [N+1];
            slots in use, int32 [N].
        """
        if self._sequences is None:
            device = self.begin_N.device
            starts = torch.cat([self.begin_N[self.order], on_device([self.rows], device)]).int()
            self._sequences = self.order, starts, on_device(self.filled, device)[self.order].int()
        return self._sequences

    def pack_entries(self, tensor_BHTD: Tensor, index_BHK: Tensor, kept_BHK: Tensor) -> Tensor:
        """Return dense slots gathered into flat entries [F,D].

        `DenseSlots.move_to_front` calls it where a prompt's end leaves heads with different numbers of tokens.

        Args:
            tensor_BHTD: dense keys or values.
            index_BHK: slots to take for each head, in order; they go to the front of its segment.
            kept_BHK: bool, False for entries of index_BHK to leave out: their places, as all free slots, are filled with zeros.
        """
        # for each flat entry: its head, its column within the head, and the slot that index_BHK has at that column
        H, (head, column) = tensor_BHTD.shape[1], self.places()
        in_range = column.clamp(max=index_BHK.shape[-1] - 1)
        entries_FD = tensor_BHTD[head // H, head % H, index_BHK.flatten(0, 1)[head, in_range]]
        is_taken = kept_BHK.flatten(0, 1)[head, in_range] & (column == in_range)
        return entries_FD.masked_fill_(~is_taken[:, None], 0)

    def unpack_entries(self, entries_FD: Tensor, B: int, H: int) -> Tensor:
        """Return flat entries [F,D] (all heads' keys or values, end to end) as dense slots [B,H,width,D]; free ones are 0.

        `RaggedSlots.make_dense` calls it where heads must have equally many slots: to append a prompt, or to score keys.
        """
        padded = entries_FD.new_zeros(B * H * self.width, entries_FD.shape[-1])
        padded[self.slot_F.long()] = entries_FD
        return padded.view(B, H, self.width, -1)

    def select_heads(self, heads_N: Tensor) -> tuple[HeadOffsets, Tensor]:
        """Return new offsets for the heads `heads_N` (numbers, may repeat), and the indices of the entries to copy for them.

        `RaggedSlots.map_rows` calls it when rows of a batch are reordered, repeated or dropped, as by beam search. Changes
        nothing.
        """
        numbers = heads_N.tolist()
        new = HeadOffsets([self.capacities[n] for n in numbers], [self.filled[n] for n in numbers], heads_N.device)
        head, column = new.places()  # of each new entry
        return new, self.begin_N[heads_N[head]] + column

    def move(self, entries_FD: Tensor, new: HeadOffsets) -> Tensor:
        """Return a copy of entries [F,D] in the segments of `new`, for the same heads. Slots that do not fit must be free.

        `RaggedSlots.resized` calls it when heads get more or fewer slots.
        """
        head, column = self.places()  # of each flat entry
        stays = column < new.capacity_N[head]
        moved = entries_FD.new_zeros(new.rows, entries_FD.shape[-1])
        moved[(new.begin_N[head] + column)[stays]] = entries_FD[stays]
        return moved
