"""Attention inside chunks: a prompt's queries against the keys of their own chunk, without a causal mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum
from torch import Tensor

from ..context import EvictionContext, NewTokens, accumulator
from .base import Need, Note, PromptRead


@dataclass
class OpenChunks(Note):
    """Rows of chunks that are not complete: queries, keys, positions (-1 for none) and columns of the layer's slots."""

    q_BHGCD: Tensor
    k_BHCD: Tensor
    positions_BC: Tensor
    columns_BC: Tensor

    def join_parts(self, later: OpenChunks) -> OpenChunks:
        """Return these rows and later ones."""
        axes = ("q_BHGCD", 3), ("k_BHCD", 2), ("positions_BC", 1), ("columns_BC", 1)
        return OpenChunks(*(torch.cat([getattr(self, name), getattr(later, name)], axis) for name, axis in axes))

    def take_columns(self, at_BM: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries [B,H,G,M,D] and keys [B,H,M,D] at these columns of each row, to attend or to keep for later."""
        b = torch.arange(len(at_BM), device=at_BM.device)[:, None]
        return self.q_BHGCD.movedim(3, 1)[b, at_BM].movedim(1, 3), self.k_BHCD.movedim(2, 1)[b, at_BM].movedim(1, 2)

    def take_newest(self, count: int, start_B1: Tensor) -> OpenChunks:
        """Return the `count` newest queries and keys of each text, which `ChunkAttention.read` keeps for the next piece.

        Those before position `start_B1` get position -1: they belong to no chunk that is open.
        """
        columns_BM = self.positions_BC.topk(min(count, self.positions_BC.shape[1]), dim=1).indices.sort(1).values
        positions = self.positions_BC.gather(1, columns_BM)
        positions = positions.masked_fill(positions < start_B1, -1)
        return OpenChunks(*self.take_columns(columns_BM), positions, self.columns_BC.gather(1, columns_BM))


@dataclass(frozen=True)
class ChunkAttention(Need[Tensor]):
    """Attention that each token of a prompt gets in its own chunk: context.state["local"] [B,H,T].

    Chunks are counted after the sinks; the sum over all rows of a chunk, averaged over the group. A token whose chunk was not
    read, such as a generated one, has 0.

    Attributes:
        size: tokens of a chunk.
    """

    size: int
    name: ClassVar[str] = "local"
    alone: ClassVar[bool] = False
    is_read: ClassVar[bool] = True

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        return {"local": new.k_BHQD.new_zeros(new.k_BHQD.shape[:3], dtype=accumulator(new.k_BHQD.dtype))}

    def read(self, prompt: PromptRead) -> None:
        """Add the attention that tokens get inside whole chunks to the layer's tensor "local", in place.

        `read_prompt` calls it after each piece of a prompt. C: rows at hand, M: those of the chunks attended at once. Tokens of
        a chunk that is not complete wait in the layer's notes for the next piece; the prompt's end completes it.
        """
        layer, size, sinks, positions_BQ = prompt.layer, self.size, prompt.sinks, prompt.positions_BQ
        columns_BQ = (prompt.past + torch.arange(positions_BQ.shape[1], device=positions_BQ.device)).expand_as(positions_BQ)
        # the tokens: those that waited, then this piece's
        rows = OpenChunks(prompt.q_BHGQD.detach(), prompt.k_BHQD.detach(), positions_BQ, columns_BQ)
        earlier = layer.notes.pop(self.name, None)
        rows = rows if earlier is None else earlier.join_parts(rows)
        (B, H, G, C, _), positions_BC = rows.q_BHGCD.shape, rows.positions_BC
        # positions: of the first token, after the last, after the last whole chunk, and where the first token's chunk begins
        order_BC, padding_B1 = positions_BC.argsort(1), (positions_BC < 0).sum(1, keepdim=True)
        first_B1 = order_BC.gather(1, padding_B1.clamp(max=C - 1))
        first_B1 = positions_BC.gather(1, first_B1)  # positions of tokens follow one another
        end_B1 = first_B1 + C - padding_B1
        complete_B1 = sinks + (end_B1 - sinks).clamp(min=0) // size * size
        stop_B1 = end_B1 if prompt.ends else complete_B1
        begin_B1 = sinks + (first_B1.clamp(min=sinks) - sinks) // size * size
        # attend inside chunks, `together` of them at once
        together = max(1, prompt.at_once // (B * H * G * size**2))
        state = layer.statistic("local")
        for chunk in range(0, C // size + 2, together):
            position_BM = begin_B1 + torch.arange(chunk * size, (chunk + together) * size, device=positions_BC.device)
            real_BM = (position_BM >= first_B1.clamp(min=sinks)) & (position_BM < stop_B1)
            row_BM = order_BC.gather(1, (padding_B1 + position_BM - first_B1).clamp(0, C - 1))
            received_BHM = _attend_in_chunks(rows, row_BM, real_BM, size)
            index = rows.columns_BC.gather(1, row_BM)[:, None].expand_as(received_BHM)
            state.scatter_add_(2, index, received_BHM.to(state.dtype))
        if not prompt.ends:
            layer.notes[self.name] = rows.take_newest(size - 1, complete_B1)

    def view(self, context: EvictionContext) -> Tensor:
        return context.state["local"]


def _attend_in_chunks(rows: OpenChunks, at_BM: Tensor, real_BM: Tensor, size: int) -> Tensor:
    """Return the attention [B,H,M] that tokens at the columns `at_BM` get from all rows of their chunk.

    `ChunkAttention.read` calls it for `together` chunks of `size` columns. Query heads that share a KV head are averaged.
    real_BM: columns that hold a token; the others get 0 and give none. In the einsum n: chunks, r: queries, m: keys of one.
    """
    q, k = rows.take_columns(at_BM)
    dtype = accumulator(q.dtype)
    q_BHGNRD, k_BHNMD = q.to(dtype).unflatten(3, (-1, size)), k.to(dtype).unflatten(2, (-1, size))
    real_BNM = real_BM.unflatten(1, (-1, size))
    x = einsum(q_BHGNRD, k_BHNMD, "b h g n r d, b h n m d -> b h g n r m")
    p = x.masked_fill(~real_BNM[:, None, None, :, None], torch.finfo(dtype).min).softmax(-1)
    total = (p * real_BNM[:, None, None, :, :, None]).sum(4).mean(2)
    return (total * real_BNM[:, None]).flatten(2)
