"""The requests of one vLLM worker, by their pages: the parts of each forward pass, and the cache of each part.

vLLM tells its attention neither which requests a pass has nor when one ends. A request's pages are its own as long as it lives,
so the first is its name; a request that begins there drops what an ended one left.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from ...cache.cache import EvictingCache
from ...cache.paged import PromptSlots, Strips, divide_pages, first_prompt
from ...cache.settings import CacheSettings
from ...policies.budgets import Budget
from ...policies.numbers import on_device
from ..packed import PackedPass, Part
from ..rows import RequestRows, RowPool


class Scheduled(NamedTuple):
    """A request's columns (tokens) in a pass: `columns` from `first` on, after `past` tokens. prompt: they are a prompt's.

    pages: in its first pass all that it has, later the first alone. asked_k: in its first pass its k; 0 for the settings'.
    """

    pages: list[int]
    first: int
    columns: int
    past: int
    prompt: bool
    asked_k: int = 0

    @property
    def name(self) -> str:
        """Name of the request: the number of its first page."""
        return str(self.pages[0])


class Requests:
    """Caches of requests.

    pools: the pages of each layer, in strips [2,S,P,D] (a strip is a page of one head), once the layer has seen them.
    newest_pass: the requests of the newest pass, by layer: layers that hold different numbers of tokens have different pages.
    divided: pages of requests that begin in it, already cut into strips. asked_k: each request's own k. reading: the rows of
    each request that has not decoded yet; prompts that began together are rows of one cache. rows: requests that decode, by
    their k, since the rows of a cache have one budget.
    """

    def __init__(self, settings: CacheSettings, device: torch.device) -> None:
        """Begin without requests; `Worker.attend` makes this at its first pass.

        settings: the policy and the budget of a request that asks for no k of its own. device: of the model.
        """
        self.settings, self.device = settings, device
        self.pools: list[Tensor | None] = [None] * settings.n_layers  # each layer's pages
        self.newest_pass: list[Sequence[Scheduled]] = [()] * settings.n_layers  # as each layer is told it
        self.divided: list[tuple[Sequence[Scheduled], list[int], Strips]] = []  # pages of requests that begin in that pass
        self.asked_k: dict[str, int] = {}  # by request: the budget that it asks for, or 0
        self._by_own = {0: settings}  # settings by such a k
        self.reading: dict[str, RequestRows] = {}  # by request, until it decodes
        self.rows = defaultdict[int, RowPool](lambda: RowPool(order=int))  # that decode, by k; in the order of their pages

    def begin(self, scheduled: Sequence[Scheduled]) -> PackedPass:
        """Begin a pass in parts, each with a cache: requests that decode, new prompts of one length, a prompt's next piece.

        `Worker.attend` calls this in the first layer of each pass. Requests with different budgets are in different parts. A
        request is named by its first page. If a new request has the page of an older one, the older one has ended and is
        dropped.
        """
        self.divided.clear()
        new_prompts, further_pieces = dict[tuple[int, int], list[Scheduled]](), list[Scheduled]()
        decoding = dict[int, dict[str, int]]()  # by k: the column of each request's token
        for one in scheduled:
            if one.past == 0:  # nothing of it was read before: it begins
                self._drop_ended(one.name)
                self.asked_k[one.name] = one.asked_k
                new_prompts.setdefault((one.columns, one.asked_k), []).append(one)
            elif one.prompt or one.columns > 1:  # the pass reads more of its prompt
                further_pieces.append(one)
            else:
                decoding.setdefault(self.asked_k[one.name], {})[one.name] = one.first
        self._split_rows({name for group in decoding.values() for name in group})
        parts = [self._step_requests(asked_k, group) for asked_k, group in decoding.items()]
        parts += [self._begin_prompts(group) for group in new_prompts.values()]
        parts += [self._continue_prompt(one) for one in further_pieces]
        packed = PackedPass(parts, self.settings)
        packed.begin(None, None)  # no token ids: vLLM's layers see none
        return packed

    def _step_requests(self, asked_k: int, decoding: dict[str, int]) -> Part:
        """Return a pass's part for requests that decode under one k: a cache with a row for each. decoding: their columns.

        `begin` calls it. A request that decodes for the first time leaves `reading`.
        """
        for name in decoding:
            self._end_prompt(name)
        rows = self.rows[asked_k].gather(decoding)
        return Part(rows.cache, on_device([[decoding[name]] for name in rows.alive], self.device))

    def _list_columns(self, together: Sequence[Scheduled]) -> Tensor:
        """Return the columns [B,Q] in the pass of requests that bring equally many tokens."""
        first_B1 = on_device([[one.first] for one in together], self.device)
        return first_B1 + torch.arange(together[0].columns, device=self.device)

    def _begin_prompts(self, together: list[Scheduled]) -> Part:
        """Return the pass's part for prompts of one length that begin in it: a new cache in vLLM's pages, a row each.

        `begin` calls it; notes them in `reading`.
        """
        together.sort(key=lambda one: one.pages[0])  # rows lie in the order of their pages
        cache, firsts = EvictingCache(self._settings_of(together[0].asked_k)), [one.first for one in together]
        for layer, slots in enumerate(cache.layers):
            slots.storage = functools.partial(self._make_slots, layer, firsts)  # called with the layer's first keys
        cache.plans.prompt_len = together[0].columns  # it evicts when so many are read
        rows = RequestRows([one.name for one in together], cache)
        self.reading |= dict.fromkeys(rows.alive, rows)  # until each decodes
        return Part(cache, self._list_columns(together))

    def _settings_of(self, asked_k: int) -> CacheSettings:
        """Return the settings for a new cache of requests that ask for this k (0: for none), made once: see `_by_own`."""
        if asked_k not in self._by_own:
            self._by_own[asked_k] = dataclasses.replace(self.settings, budget=Budget((asked_k,) * self.settings.n_layers))
        return self._by_own[asked_k]

    def _continue_prompt(self, one: Scheduled) -> Part:
        """Return a pass's part for a further piece of a prompt, for `begin`. The cache evicts after it as at a prompt's end."""
        cache = self.reading[one.name].cache
        cache.plans.prompt_len = one.past + one.columns
        return Part(cache, self._list_columns([one]))

    def _make_slots(self, layer: int, firsts: list[int], keys: Tensor, values: Tensor) -> PromptSlots:
        """Return a layer's storage of keys and values in new requests' pages, which are set to 0 first.

        The cache of their prompts calls this, as `_begin_prompts` arranged, when the layer's first keys and values come.
        firsts: the first column of each request in the pass.
        """
        pool = self.pools[layer]
        assert pool is not None  # `Worker.attend` has set it
        return first_prompt(keys, values, pool, self._divide_pages(self.newest_pass[layer], firsts, keys.shape[1]))

    def _divide_pages(self, now: Sequence[Scheduled], firsts: list[int], heads: int) -> Strips:
        """Return new requests' pages as strips (a page of one head each), for `_make_slots`.

        Noted in `divided` for further layers with the same pages: vLLM gives these the same object `now`. `begin` clears that.
        """
        for noted_pass, noted_firsts, strips in self.divided:
            if noted_pass is now and noted_firsts is firsts:
                return strips
        pages = {one.first: one.pages for one in now}
        strips = divide_pages([pages[first] for first in firsts], heads, self.device)
        self.divided.append((now, firsts, strips))
        return strips

    def _split_rows(self, decoding: Set[str]) -> None:
        """Give each request in `reading` its row in a cache of its own, unless all that share the cache decode in this pass.

        `begin` calls it before a pass. decoding: names of the requests that decode.
        """
        for name, rows in list(self.reading.items()):
            if len(rows.names) > 1 and not decoding >= set(rows.names):
                self.reading[name] = RequestRows([name], rows.cache.select_rows(rows.names.index(name)))

    def _end_prompt(self, name: str) -> None:
        """Move a request, and those that share its cache, from `reading` to `rows` (that decode), at its first decode step.

        `_step_requests` calls it for each request that decodes; later calls do nothing.
        """
        rows = self.reading.get(name)
        if rows is not None:
            for one in rows.alive:
                del self.reading[one]
            self.rows[self.asked_k[name]].parts.append(rows)

    def _drop_ended(self, name: str) -> None:
        """Drop the request that had this first page before: a new one begins there, so that one has ended."""
        self.reading.pop(name, None)
        self.rows[self.asked_k.pop(name, 0)].drop(name)
