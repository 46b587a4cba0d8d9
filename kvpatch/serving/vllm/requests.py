"""The requests of one vLLM worker, by their pages: the parts of each forward pass, and the cache of each part.

vLLM tells its attention neither which requests a pass has nor when one ends. A request's pages are its own as long as it lives,
so the first is its name; a request that begins there drops what an ended one left.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...cache.cache import EvictingCache
from ...cache.paged import PromptSlots, first_prompt
from ...cache.settings import CacheSettings
from ..packed import PackedPass, Part
from ..rows import RowPool


class Scheduled(NamedTuple):
    """A request's columns in a packed pass: `columns` from `first` on, after `past` tokens. prompt: they are a prompt's.

    pages: all that it has, where it begins; then, some.
    """

    pages: list[int]
    first: int
    columns: int
    past: int
    prompt: bool


class Requests:
    """Caches of requests.

    pools: the pages of each layer, [N,H,2,P,D], once the layer has seen them. now: the newest pass, as each layer is told it:
    layers that hold different numbers of tokens have different pages.
    """

    def __init__(self, settings: CacheSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.pools: list[Tensor | None] = [None] * settings.n_layers
        self.now: list[Sequence[Scheduled]] = [()] * settings.n_layers
        self.reading: dict[str, EvictingCache] = {}
        self.rows = RowPool(order=int)  # by their pages

    def begin(self, scheduled: Sequence[Scheduled]) -> PackedPass:
        """Begin a pass: each piece of a prompt as a part of its own, and the requests that decode as one."""
        parts, decoding = list[Part](), dict[str, int]()
        for one in scheduled:
            name = str(one.pages[0])
            if one.past == 0:
                self._forget(name)
            if one.past == 0 or one.prompt or one.columns > 1:
                parts.append(Part(self._prompt(name, one), self._columns(one), decodes=False))
            else:
                decoding[name] = one.first
        if decoding:
            for name in decoding:
                if name in self.reading:
                    self.rows.add(name, self.reading.pop(name))
            rows = self.rows.gather(decoding)
            columns = torch.tensor([decoding[name] for name in rows.alive], device=self.device)
            parts.insert(0, Part(rows.cache, columns, decodes=True))
        packed = PackedPass(parts, self.settings)
        packed.begin(None, None)
        return packed

    def _columns(self, one: Scheduled) -> Tensor:
        return torch.arange(one.first, one.first + one.columns, device=self.device)

    def _prompt(self, name: str, one: Scheduled) -> EvictingCache:
        """Return the cache that reads a piece of a prompt; the piece is compressed like a prompt."""
        if name not in self.reading:
            assert one.past == 0, "a request begins with its first token"
            cache = self.reading[name] = EvictingCache(self.settings)
            for layer, slots in enumerate(cache.layers):
                slots.storage = functools.partial(self._stored, layer, one.first)
        cache = self.reading[name]
        cache.request.prompt_len = one.past + one.columns
        return cache

    def _stored(self, layer: int, first: int, keys: Tensor, values: Tensor) -> PromptSlots:
        """Make a layer's slots for a request whose columns begin at `first`, with its pages of that layer."""
        pool, (pages,) = self.pools[layer], [one.pages for one in self.now[layer] if one.first == first]
        assert pool is not None
        return first_prompt(keys, values, pool, torch.tensor([pages], device=self.device))

    def _forget(self, name: str) -> None:
        self.reading.pop(name, None)
        self.rows.drop(name)
