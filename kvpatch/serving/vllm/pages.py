"""The pages of a request: a spec of a layer's keys and values, and the manager that claims all of them at admission.

A request claims pages for all that it will ever hold when it begins, and needs none later: vLLM never has to preempt one, which
would read a text again whose tokens were evicted. Behind its pages the block table has page 0, which is nobody's: the worker is
told of a request's pages alone, and sees there that it has no more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from vllm.config import CacheConfig, VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from ...cache.holding import count_tokens
from ...policies.budgets import Size
from .callers import iterate_callers
from .free_pages import choose_pages

SLOTS = 16
"""Slots of a page where the user has not asked for a size: few, since a request wastes up to a page."""


class Held(NamedTuple):
    """A layer's budget: tokens, or a share of the prompt. grows: what is generated is kept too."""

    budget: int | float
    grows: bool


@dataclass(frozen=True, kw_only=True)
class BudgetSpec(CircularBufferSpec):
    """Pages of `block_size` slots. Layers of one spec have one block table; others have pages, as large, of their own.

    budget: of a head: a number of tokens, or a share of the request's prompt. longest: tokens of the longest text. grows: what
    is generated is kept too.
    """

    budget: int | float
    longest: int
    grows: bool

    @classmethod
    def of(cls, spec: AttentionSpec, layer: Held, longest: int, cache: CacheConfig) -> BudgetSpec:
        """Return a layer's spec, for which vLLM has made `spec`."""
        budget, grows = layer
        own = {field.name for field in fields(cls)}
        same = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name in own}
        size = cache.block_size if cache.user_specified_block_size else SLOTS
        return cls(**{**same, "block_size": size, "budget": budget, "longest": longest, "grows": grows})

    def pages(self, prompt: int, total: int | None = None) -> int:
        """Return the pages of a request: for the tokens that it will hold, and the one being written.

        A share is of the whole prompt: it is then read in one pass.

        prompt: tokens of its prompt, or some of them if `total` is None. total: its tokens in the end; None: as many as fit.
        """
        schedule, last = "prompt" if self.grows else "both", min(total or self.longest, self.longest)
        (held,) = count_tokens(Size(self.budget), schedule, prompt, max(last - 1 - prompt, 0))
        return cdiv(min(held + 1, self.longest), self.block_size)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Tell if all layers have one block table."""
        return all(spec == self for spec in kv_cache_specs.values())

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the largest request."""
        return max(self.pages(1), self.pages(self.longest)) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Return the width of the block table, page 0 behind the last: positions are looked up there, but not written."""
        return cdiv(max_len, self.block_size) + 2


class BudgetManager(CircularBufferManager):
    """Claims a request's pages with its first tokens."""

    kv_cache_spec: BudgetSpec

    def __init__(self, *told: Any, **more: Any) -> None:
        super().__init__(*told, **more)
        self._scheduler = _find_scheduler()

    def _count_pages(self, request_id: str, num_tokens: int) -> int:
        """Count the pages of a request that begins with so many tokens."""
        scheduler = self._scheduler()
        request = None if scheduler is None else scheduler.requests.get(request_id)
        if request is None or request.resumable:  # whose text may become longer than its max_tokens say
            return self.kv_cache_spec.pages(num_tokens)
        return self.kv_cache_spec.pages(request.num_tokens, request.num_prompt_tokens + request.max_tokens)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *told: Any, **more: Any) -> int:
        """Return the pages that a new request needs; none for one that was admitted."""
        return 0 if self.req_to_blocks.get(request_id) else self._count_pages(request_id, num_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *told: Any, **more: Any) -> Sequence[KVCacheBlock]:
        """Claim a new request's pages."""
        blocks, pool = self.req_to_blocks[request_id], self.block_pool
        if blocks:
            return []
        free = bytes(one.ref_cnt == 0 and not one.is_null for one in pool.blocks)
        new = [pool.blocks[page] for page in choose_pages(free, self._count_pages(request_id, num_tokens))]
        pool.touch(new)  # takes them from the free ones
        blocks.extend([*new, pool.null_block])
        return [*blocks]


def _find_scheduler() -> Callable[[], Any]:
    """Return a reference to the scheduler that is being made, or one to nothing.

    vLLM tells a manager the id of a request and the tokens of its first pass. How many it may generate is known to the
    scheduler, which makes the managers: it is among their callers.
    """
    for told in iterate_callers():
        one = told.get("self")
        if isinstance(one, SchedulerInterface) and hasattr(one, "requests"):
            return weakref.ref(one)
    return lambda: None


KVCacheSpecRegistry._ensure_registered()  # else vLLM leaves its own out
KVCacheSpecRegistry.register(BudgetSpec, BudgetManager, uniform_type_base_spec=BudgetSpec)
