"""The pages of a request: a spec of a layer's keys and values, and the manager that claims all of them at admission.

A request claims pages for all that it will ever hold when it begins, and needs none later: vLLM never has to preempt one, which
would read a text again whose tokens were evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from ...cache.holding import count_tokens
from ...policies.budgets import Size


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
    def of(cls, spec: AttentionSpec, layer: Held, longest: int, alike: bool) -> BudgetSpec:
        """Return a layer's spec, for which vLLM has made `spec`.

        alike: all layers hold as much. They then have one page of the exact size, unless requests differ.
        """
        budget, grows = layer
        own = {field.name for field in fields(cls)}
        same = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name in own}
        size = min(budget, longest) + 1 if alike and not grows and isinstance(budget, int) else spec.block_size
        return cls(**{**same, "block_size": size, "budget": budget, "longest": longest, "grows": grows})

    def pages(self, prompt: int) -> int:
        """Return the pages of a request, whose prompt has at least so many tokens: for its tokens and the one being written.

        A share is of the whole prompt: it is then read in one pass.
        """
        schedule = "prompt" if self.grows else "both"
        (held,) = count_tokens(Size(self.budget), schedule, prompt, max(self.longest - prompt, 0))
        return cdiv(min(held, self.longest) + 1, self.block_size)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Tell if all layers have one block table."""
        return all(spec == self for spec in kv_cache_specs.values())

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the largest request."""
        return max(self.pages(1), self.pages(self.longest)) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Return the width of the block table: positions are looked up in it, though nothing is written there."""
        return cdiv(max_len, self.block_size) + 1


class BudgetManager(CircularBufferManager):
    """Claims a request's pages with its first tokens."""

    kv_cache_spec: BudgetSpec

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *told: Any, **more: Any) -> int:
        """Return the pages that a new request needs; none for one that was admitted."""
        return 0 if self.req_to_blocks.get(request_id) else self.kv_cache_spec.pages(num_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *told: Any, **more: Any) -> Sequence[KVCacheBlock]:
        """Claim a new request's pages."""
        blocks = self.req_to_blocks[request_id]
        if blocks:
            return []
        new = self.block_pool.get_new_blocks(self.kv_cache_spec.pages(num_tokens))
        blocks.extend(new)
        return new


KVCacheSpecRegistry._ensure_registered()  # else vLLM leaves its own out
KVCacheSpecRegistry.register(BudgetSpec, BudgetManager, uniform_type_base_spec=BudgetSpec)
