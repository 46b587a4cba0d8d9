"""A packed pass: the tokens of many requests in one row, each attended to through the cache of its request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import passes
from ..cache.cache import EvictingCache
from ..cache.settings import CacheSettings

Core = Callable[[EvictingCache, Tensor, Tensor, Tensor], Tensor]


class Part(NamedTuple):
    """Columns (tokens) of a packed pass that go through one cache, row by row, as indices into q, k and v of the pass.

    open: the prompt's block goes on in the next pass, and nothing is evicted before its end.
    """

    cache: EvictingCache
    columns_BQ: Tensor
    open: bool = False

    def of(self, packed: Tensor) -> Tensor:
        """Return this part's columns of a tensor of the whole pass, [B,Q,...]."""
        return packed[self.columns_BQ]


class PackedPass:
    """The parts of one forward pass; together they cover its columns (tokens). settings: those of all the parts' caches."""

    def __init__(self, parts: list[Part], settings: CacheSettings) -> None:
        self.parts, self.settings = parts, settings

    def begin(self, input_ids_Q: Tensor | None, table: Callable[[int], object] | None) -> None:
        """Begin the pass in the cache of each part (some requests' tokens), before the first layer.

        `_begin_packed` and, in vLLM, `Requests.begin` call it once per pass. table: makes the rotary table for a number of
        positions, if keys are cached without their rotation.
        """
        for part in self.parts:
            B, Q = part.columns_BQ.shape
            ids_BQ = None if input_ids_Q is None else part.of(input_ids_Q)
            # notes in the cache how many tokens come
            passes.begin(part.cache, B, Q, None, ids_BQ, part.columns_BQ.device, table)
            block = part.cache.settings.block
            if part.open and block is not None and Q % block:  # the prompt's last block, cut by the pass's end, goes on
                part.cache.current_pass.blocks[-1].ends_prompt = False  # in the next pass: nothing is evicted before

    @property
    def positions_1Q(self) -> Tensor:
        """Positions of the columns, once the pass has begun."""
        return self._in_order([part.cache.current_pass.positions_BQ.flatten() for part in self.parts])[None]

    def attend(self, core: Core, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run a layer's attention, a cache at a time: q [1,H*G,Q,D], k and v [1,H,Q,D] -> [1,Q,H*G*D].

        Called once per layer by the patched attention layer, in vLLM by `Worker.attend`. core: attends through the cache of one
        part, and writes the new keys and values to it.
        """
        if len(self.parts) == 1 and len(self.parts[0].columns_BQ) == 1:
            return core(self.parts[0].cache, q, k, v)
        outs = list[Tensor]()
        for part in self.parts:
            qkv = (part.of(one[0].transpose(0, 1)).transpose(1, 2).contiguous() for one in (q, k, v))
            outs.append(core(part.cache, *qkv).flatten(0, 1))
        return self._in_order(outs)[None]  # in the order of the pass's tokens

    def _in_order(self, parts: list[Tensor]) -> Tensor:
        """Concatenate the parts' values of their columns in the order of the pass."""
        columns, values = torch.cat([part.columns_BQ.flatten() for part in self.parts]), torch.cat(parts)
        return torch.empty_like(values).index_copy_(0, columns, values)
