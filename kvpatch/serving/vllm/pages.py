"""The pages of a request: a spec of a layer's keys and values, and the manager that claims all of them at admission.

A request claims pages for all that it will ever hold when it begins, and needs none later: vLLM never has to preempt one, which
would read a text again whose tokens were evicted. After its pages the block table has page 0, which is nobody's, and then the
request's own k, or 0: the worker is told of a request's pages alone, and sees there that it has no more, and what it may hold.
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
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, KVCacheGroupRole, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from ...cache.holding import count_tokens
from ...errors import KVPatchError
from ...policies.budgets import Size
from .account import BudgetLog, read_own
from .callers import iterate_callers
from .figures import find_figures
from .free_pages import choose_pages

SLOTS = 16
"""Slots of a page where the user has not asked for a size: few, since a request wastes up to a page."""


class LayerBudget(NamedTuple):
    """A layer's budget: tokens that a head holds, or a share of the prompt.

    grows: what is generated is kept too. bound: the budget is the layer's sliding window, whatever k a request asks for. most:
    the most tokens that a request may ask for as its own k; 0 if it may not ask.
    """

    budget: int | float
    grows: bool
    bound: bool
    most: int


@dataclass(frozen=True, kw_only=True)
class BudgetSpec(CircularBufferSpec):
    """Spec of a layer's pages of `block_size` slots (places for tokens) under its budget, by which vLLM sizes and claims them.

    Layers with equal specs share one block table (list of a request's pages); others have pages of the same size, but their
    own. held: the layers' budget. longest: tokens of the longest text.
    """

    held: LayerBudget
    longest: int

    @classmethod
    def of(cls, spec: AttentionSpec, layer: LayerBudget, longest: int, cache: CacheConfig) -> BudgetSpec:
        """Return the spec of a layer's pages under its budget (`layer`); all else is as in vLLM's `spec`.

        `Worker.spec` calls it when vLLM sizes pages. longest: tokens of the longest text. cache: vLLM's settings, for the
        number of tokens of a page.
        """
        names = {field.name for field in fields(cls)}
        shared = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name in names}
        size = cache.block_size if cache.user_specified_block_size else SLOTS
        return cls(**{**shared, "block_size": size, "held": layer, "longest": longest})

    def count_held(self, prompt: int, new: int, asked_k: int = 0) -> int:
        """Return how many tokens a head holds after a prompt and `new` tokens. asked_k: the request's own budget, or 0.

        `pages` and `BudgetLog.note_end` call it.
        """
        # held.bound: a sliding window, whatever the request's k; held.grows: generated tokens are all kept (the schedule
        # "prompt", by which only prompts are evicted; "both" evicts generated tokens too)
        budget, schedule = (
            asked_k if asked_k and not self.held.bound else self.held.budget,
            "prompt" if self.held.grows else "both",
        )
        (held,) = count_tokens(Size(budget), schedule, prompt, new)
        return held

    def pages(self, prompt: int, total: int | None = None, asked_k: int = 0) -> int:
        """Return how many pages a request claims as it begins, for the tokens that it will hold and the one being written.

        `_count_pages` and `most_pages` call it. Under a k that is a share of the prompt, the prompt is read in one pass, and
        `prompt` is all of it. prompt: tokens of its prompt, or those of its first pass if `total` is None. total: tokens of
        prompt and answer; None: as many as the model takes. asked_k: the budget that the request asks for, or 0.
        """
        length = min(total or self.longest, self.longest)
        held = self.count_held(prompt, max(length - 1 - prompt, 0), asked_k)  # the last token is never fed back
        return cdiv(min(held + 1, self.longest), self.block_size)

    def most_pages(self, prompt: int | None = None) -> int:
        """Return the most pages that a request may need whose first pass reads so many tokens of its prompt; None: any."""
        prompts = (1, self.longest) if prompt is None else (prompt,)
        return max(self.pages(n, asked_k=asked_k) for n in prompts for asked_k in (0, self.held.most))

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Tell vLLM if these layers can have one block table: all have the same spec."""
        return all(spec == self for spec in kv_cache_specs.values())

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the largest request. vLLM asks when it checks its memory, at the start.

        Raises:
            KVPatchError: there is too little for one request. vLLM would ask about ever shorter texts, until one fits, but
                under a budget these need as many bytes.
        """
        _refuse_too_few_bytes()
        return self.most_pages() * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Return the width of the block table: a column for each page of the longest text, though a request has fewer pages.

        The columns beyond these have room for the page 0 and the k that follow a request's pages.
        """
        return cdiv(max_len, self.block_size) + 3


class BudgetManager(CircularBufferManager):
    """Claims a request's pages with its first tokens."""

    kv_cache_spec: BudgetSpec

    def __init__(self, *given: Any, **more: Any) -> None:
        """Make the page manager of a group of layers; vLLM's scheduler calls it. The first one also counts requests."""
        super().__init__(*given, **more)
        self._scheduler = _find_scheduler()
        scheduler = self._scheduler()
        self._figures = find_figures()
        # the first group's manager logs and counts, for /metrics, what all groups hold
        self._account = None if scheduler is None or self.kv_cache_group_id else BudgetLog(scheduler, self._figures)

    def _find_request(self, request_id: str) -> Any:
        """Return a request, or None if its scheduler is not known."""
        scheduler = self._scheduler()
        return None if scheduler is None else scheduler.requests.get(request_id)

    def _count_pages(self, request_id: str, num_tokens: int) -> tuple[int, int]:
        """Return how many pages a new request needs, and the k that it asks for, or 0. num_tokens: what a first pass reads.

        `get_num_blocks_to_allocate` and `allocate_new_blocks` call it. Without the scheduler, the largest text is assumed.
        """
        request = self._find_request(request_id)
        if request is None:
            return self.kv_cache_spec.pages(num_tokens), 0
        asked_k = read_own(request.sampling_params, self.kv_cache_spec.held.most)
        if request.resumable:  # its text may become longer than its max_tokens say
            return self.kv_cache_spec.pages(num_tokens, asked_k=asked_k), asked_k
        return self.kv_cache_spec.pages(request.num_tokens, request.num_prompt_tokens + request.max_tokens, asked_k), asked_k

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *given: Any, **more: Any) -> int:
        """Return how many pages a new request needs, and 0 for one that was admitted. vLLM asks before each pass."""
        return 0 if self.req_to_blocks.get(request_id) else self._count_pages(request_id, num_tokens)[0]

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *given: Any, **more: Any) -> Sequence[KVCacheBlock]:
        """Claim all pages of a request before its first pass; return them, page 0, and the k that it asks for. Later: [].

        vLLM's scheduler calls this before each pass of each request. The worker gets only page numbers: the 0 ends those of the
        request, and the next one is its k, or 0.
        """
        blocks, pool, request = self.req_to_blocks[request_id], self.block_pool, self._find_request(request_id)
        if self._account is not None and request is not None:
            self._account.note_pass(request, num_tokens, begins=not blocks)
        if blocks:
            return []
        count, asked_k = self._count_pages(request_id, num_tokens)
        free = bytes(one.ref_cnt == 0 and not one.is_null for one in pool.blocks)
        new = [pool.blocks[page] for page in choose_pages(free, count)]
        pool.touch(new)  # takes them from the free ones
        self._note_taken(len(new))  # for /metrics
        blocks.extend([*new, pool.null_block, KVCacheBlock(block_id=asked_k, is_null=True)])  # a null block is never freed
        return [*blocks]

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Return the pages of a request that has ended, and count it for /metrics. vLLM calls this, and frees the pages."""
        request = self._find_request(request_id)
        if self._account is not None and request is not None:
            self._account.note_end(request)
        blocks = super().pop_blocks_for_free(request_id)
        self._note_taken(-sum(not block.is_null for block in blocks))  # for /metrics
        return blocks

    def _note_taken(self, pages: int) -> None:
        if self._figures is not None:
            self._figures.add("blocks_claimed", pages)


def _find_scheduler() -> Callable[[], Any]:
    """Return a weak reference to the scheduler that is being made, to ask it for requests; it gives None if none is found.

    `BudgetManager` calls it when made. vLLM tells a manager the id of a request and the tokens of its first pass. How many it
    may generate is known to the scheduler, which makes the managers: it is among their callers.
    """
    for variables in iterate_callers():
        one = variables.get("self")
        if isinstance(one, SchedulerInterface) and hasattr(one, "requests"):
            return weakref.ref(one)
    return lambda: None


def _refuse_too_few_bytes() -> None:
    """Raise KVPatchError, as vLLM starts, if one request does not fit its memory: local variables of its callers tell.

    `max_memory_usage_bytes` calls it, from within vLLM's own check.
    """
    for variables in iterate_callers():
        needed, available = variables.get("needed_memory"), variables.get("available_memory")
        if isinstance(needed, int) and isinstance(available, int) and needed > available:
            raise KVPatchError(
                f"A request under kvpatch's budget takes {needed / 1e6:.3g} MB of keys and values, and there are "
                f"{available / 1e6:.3g} MB: give a smaller k (or max_k), or more memory (--gpu-memory-utilization; on a CPU "
                "the variable VLLM_CPU_KVCACHE_SPACE)."
            )


def check_manager(spec: BudgetSpec) -> None:
    """Raise KVPatchError if another class than BudgetManager would manage pages under a budget.

    `Worker.spec` calls it as vLLM starts.
    """
    manager = KVCacheSpecRegistry.get_manager_class(spec, KVCacheGroupRole.DEFAULT)
    if manager is not BudgetManager:
        raise KVPatchError(
            f"Pages under kvpatch's budget would be managed by {manager.__name__ if manager else None}, which another plugin "
            "has registered: leave that plugin or kvpatch's settings out."
        )


KVCacheSpecRegistry._ensure_registered()  # else vLLM leaves its own out
KVCacheSpecRegistry.register(BudgetSpec, BudgetManager, uniform_type_base_spec=BudgetSpec)
