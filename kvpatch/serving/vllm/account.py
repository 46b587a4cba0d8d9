"""Account of a budget in a scheduler of vLLM: the line that is logged at the start, and counts of its requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .configuration import find_settings
from .figures import Figures
from .terms import OWN, find_own

_LOG = logging.getLogger("vllm.kvpatch")


def get_asked(sampling: Any) -> Mapping[str, Any]:
    """Return a request's options for kvpatch, the extra_args of its SamplingParams."""
    return (None if sampling is None else sampling.extra_args) or {}


def read_own(sampling: Any, most: int) -> int:
    """Return the k that a request asks for, at most `most`, or 0."""
    return find_own(get_asked(sampling), most)


class BudgetLog:
    """The account of one scheduler, for all its groups of layers: layers of a group hold equally many tokens.

    figures: where the counts go; None where nobody reads them.
    """

    def __init__(self, scheduler: Any, figures: Figures | None) -> None:
        """Log a line on the budget, and set gauges of the pages in all and those claimed.

        The first `BudgetManager` makes one as vLLM starts. Only reads the scheduler. figures: the numbers that vLLM's /metrics
        shows, or None.
        """
        self.figures = figures
        self.groups = [(len(one.layer_names), one.kv_cache_spec) for one in scheduler.kv_cache_config.kv_cache_groups]
        self._log_start(scheduler)
        if self.figures is not None:
            self.figures.set("blocks", scheduler.kv_cache_config.num_blocks - 1)  # the first page is vLLM's null block
            self.figures.set("blocks_claimed", 0)

    def _log_start(self, scheduler: Any) -> None:
        """Log one line of the budget for an operator, as `BudgetLog` is made: vLLM has then divided its memory into pages.

        It tells how many pages and bytes a request takes at most, and how many such requests fit.
        """
        config, blocks = scheduler.vllm_config, scheduler.kv_cache_config.num_blocks - 1
        terms = find_settings(config)
        if terms is None:
            return
        sizes = [f"{spec.most_pages()} pages of {spec.block_size} slots in {layers} layers" for layers, spec in self.groups]
        size = sum(spec.most_pages() * spec.page_size_bytes * layers for layers, spec in self.groups)
        # chunk: tokens of a prompt that one pass reads; None: all of them
        chunk = config.scheduler_config.max_num_batched_tokens if config.scheduler_config.enable_chunked_prefill else None
        n_fitting = blocks // sum(spec.most_pages() for _, spec in self.groups)
        size_of_all_ranks = size * config.parallel_config.tensor_parallel_size
        _LOG.info(terms.describe_start(" and ".join(sizes), size_of_all_ranks, n_fitting, chunk))

    def note_pass(self, request: Any, tokens: int, begins: bool) -> None:
        """Count a coming pass of a request if it reads a piece of the prompt without the prompt's end.

        `allocate_new_blocks` calls it before each pass of each request. tokens: how many will have been read after the pass.
        begins: it is the request's first pass. If the request asks for a k (budget) in its extra_args, by the name OWN, and
        cannot have it, a warning is logged then.
        """
        extra_args = get_asked(request.sampling_params)
        # 0: the request has no valid k of its own
        if begins and OWN in extra_args and not read_own(request.sampling_params, self.groups[0][1].held.most):
            _LOG.warning("[kvpatch] %s=%r of a request is not served: it has the k of the start.", OWN, extra_args[OWN])
        if self.figures is not None and tokens < request.num_prompt_tokens:
            self.figures.add("prompt_cuts")

    def note_end(self, request: Any) -> None:
        """Count a request when its pages are freed: the tokens that it has read, held in the end, and evicted.

        `pop_blocks_for_free` calls it. Nothing is counted for a request that is only preempted.
        """
        if self.figures is None or not request.is_finished():
            return
        written = request.num_tokens - request.num_prompt_tokens
        n_read = min(request.num_computed_tokens, request.num_tokens - bool(written))  # the last is never fed back
        prompt = min(n_read, request.num_prompt_tokens)
        # of each group of layers, the budget that the request itself asks for (held.most at most), or 0
        asked_k = [read_own(request.sampling_params, spec.held.most) for _, spec in self.groups]
        held = sum(
            layers * spec.count_held(prompt, n_read - prompt, k) for (layers, spec), k in zip(self.groups, asked_k, strict=True)
        )
        evicted = n_read - held / sum(layers for layers, _ in self.groups)
        for name, value in (("seen_tokens", n_read), ("held_tokens", n_read - evicted), ("evicted_tokens", evicted)):
            self.figures.add(name, value)
        self.figures.add("ended_requests")
        self.figures.add("compressed_requests", evicted > 0)
