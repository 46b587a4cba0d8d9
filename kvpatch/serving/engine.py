"""transformers' continuous batching under a patch: a manager whose requests each have a budget.

All names that transformers does not promise are imported or listed here; tests/serving/test_engine_names.py compares them with
the installed version.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.continuous_api import (
    SCHEDULER_MAPPING,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    FIFOScheduler,
)
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.stopping_criteria import StopStringCriteria

from ..arch.upstream import KEPT_MANAGER
from ..cache.prefix import Prefix
from ..cache.settings import CacheSettings
from ..errors import KVPatchError
from .admission import Admission
from .conversations import Conversations
from .pool import RequestPool

_LOG = logging.getLogger("kvpatch.serving")

# options that assume unevicted blocks or graphs of a fixed shape: (name, value here, what it is)
OFF: tuple[tuple[str, object, str], ...] = (
    ("allow_block_sharing", False, "prefix sharing"),
    ("cpu_offload_space", 0.0, "CPU offload"),
    ("use_cuda_graph", False, "CUDA graphs"),
    ("use_async_batching", False, "asynchronous batching"),
    ("max_blocks_per_request", 0, "the block table"),
    ("varlen_compile_config", None, "torch.compile"),
    ("decode_compile_config", None, "torch.compile"),
    ("default_compile_level", 0, "torch.compile"),
)


@dataclass(frozen=True)
class EngineTerms:
    """Facts of a patch and its model, which an engine serves under.

    max_positions: how many the model has; None for any number. kv_bytes: bytes of a token's keys and values in all layers.
    carry: makes the attention mask of a packed pass, by which the decoder's hook finds the pool. find_prefix: returns the
    patch's prefix that a text begins with, if any. limit: what an error says of max_positions. placeholders: what ids that are
    no text stand for, such as "an image".
    """

    settings: CacheSettings
    max_positions: int | None
    kv_bytes: int
    carry: Callable[[RequestPool], Tensor]
    find_prefix: Callable[[Sequence[int]], Prefix | None]
    limit: str
    placeholders: Mapping[int, str]


class BatchingManager(ContinuousBatchingManager):
    """transformers' manager over a RequestPool in place of its paged cache."""

    pool: RequestPool
    over = False  # the patch was removed

    def __init__(
        self,
        model: Any,
        terms: EngineTerms,
        generation_config: Any,
        config: ContinuousBatchingConfig,
        workload_hints: Any,
        tokenizer: Any,
        conversations: Conversations | None,
    ) -> None:
        """Make a manager that has not started; `find_manager` calls it.

        Its thread makes the pool, which takes the place of transformers' paged cache. terms: facts of the patch and the model.
        tokenizer: for stop strings. conversations: where caches of ended requests go.
        """
        self.terms, self.conversations = terms, conversations
        self.stops = _make_stops(getattr(generation_config, "stop_strings", None), tokenizer)
        super().__init__(model, generation_config, _switch_off(config), workload_hints)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Leave the model's attention as it is: the patch computes it."""

    def _generation_step(self) -> None:
        """Run one forward pass of all requests, in transformers' thread. Raises KVPatchError if the patch was removed.

        transformers' loop calls it again and again while there are requests. `over` is set by `stop_managers`.
        """
        if self.over:  # `stop_managers` has set it
            raise KVPatchError(
                "The patch that this continuous batching manager was made under was removed: make a new one with "
                "model.init_continuous_batching()."
            )
        # the model as transformers' processor will call it: its attention mask is an object that leads kvpatch to the pool
        model: Any = _Packing(self.model, self.pool, self.terms.carry)
        assert self.batch_processor is not None
        if self.pool.next_tokens:  # tokens that were scheduled
            self.batch_processor._generation_step(model)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """Return transformers' processor, with a RequestPool for its paged cache and a scheduler that checks requests first.

        transformers' thread calls this when it starts; a processor of an earlier start is used again. Sets self.pool.
        """
        ready = getattr(self, "batch_processor", None)
        if isinstance(ready, ContinuousBatchProcessor):
            ready.reset()
            return ready
        config = self.continuous_batching_config
        self.pool, text_config = self._make_pool(), self.model.config.get_text_config()
        pool: Any = self.pool
        update_cb_config_after_cache_creation(  # transformers: fills in what it derives
            cb_config=config, num_blocks=pool.num_blocks, max_batch_tokens=pool.max_batch_tokens
        )
        scheduler_class = SCHEDULER_MAPPING.get(config.scheduler_type, FIFOScheduler)
        scheduler = type("BudgetScheduler", (Admission, scheduler_class), {})(
            cache=pool, safety_margin=config.safety_margin, max_requests_per_batch=config.max_requests_per_batch
        )
        scheduler.max_positions, scheduler.limit = self.terms.max_positions, self.terms.limit  # limit: words of an error
        if self.stops is not None:
            pool.after_token = functools.partial(scheduler.end_at, self.stops)
        self._use_prefix_sharing = False
        processor = ContinuousBatchProcessor(
            cache=pool,
            config=text_config,
            generation_config=self.generation_config,
            continuous_batching_config=config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
        self.pool.compute = functools.partial(_on_stream, processor.inputs_and_outputs.compute_stream)  # for copies of caches
        return processor

    def _make_pool(self) -> RequestPool:
        """Make the pool, with as many blocks as transformers' paged cache would have in free memory.

        `_create_batch_processor` calls it as the thread starts. A block is room for config.page_size tokens in each layer.
        """
        config = self.continuous_batching_config
        per_block, settings = self.terms.kv_bytes * config.page_size, self.terms.settings
        handler = PagedAttentionMemoryHandler(  # transformers' estimate of free memory; its sector is our block
            config=self.model.config.get_text_config(),
            cb_config=config,
            dtype=self.model.dtype,
            bytes_per_sector=per_block,
            tokens_per_sector=config.page_size,
            bytes_per_block=per_block,
            attn_types=[],
            model_supports_logits_to_keep=_supports_logits_to_keep(self.model),
        )
        handler.num_attention_masks = 0  # none is built
        chunk, blocks = handler.infer_max_batch_tokens_and_num_sectors()  # chunk: tokens of a prompt that one pass reads
        if settings.block is not None:  # eviction after every `block` tokens: a pass ends where a block does
            chunk = max(chunk // settings.block, 1) * settings.block
        n_decoding = config.max_requests_per_batch or chunk  # requests that decode in the pass of a prompt's chunk
        pool = RequestPool(settings, blocks, config.page_size, chunk + n_decoding, self.model.device)
        pool.chunk, pool.find_prefix, pool.conversations = chunk, self.terms.find_prefix, self.conversations
        pool.placeholders = self.terms.placeholders  # ids that stand for images or sound
        return pool


class _Packing:
    """The model as the engine calls it, which drops the engine's arguments about pages and passes the pool in the mask."""

    def __init__(self, model: Any, pool: RequestPool, carry: Callable[[RequestPool], Tensor]) -> None:
        self.model, self.pool, self.carry = model, pool, carry

    def _supports_logits_to_keep(self) -> bool:
        return _supports_logits_to_keep(self.model)

    def __call__(self, input_ids: Tensor, **given: Any) -> Any:
        """Run the model on the tokens of a packed pass. The engine calls it in place of the model."""
        kept = {name: value for name, value in given.items() if name == "logits_to_keep"}
        return self.model(input_ids=input_ids, attention_mask=self.carry(self.pool), use_cache=False, **kept)


def _supports_logits_to_keep(model: Any) -> bool:
    """Tell whether the model can compute the logits of chosen tokens alone, as transformers' own method says."""
    supports = getattr(model, "_supports_logits_to_keep", None)
    return callable(supports) and bool(supports())


def find_manager(
    model: Any,
    terms: EngineTerms,
    generation_config: Any,
    continuous_batching_config: ContinuousBatchingConfig | None,
    workload_hints: Any,
    tokenizer: Any,
    conversations: Conversations | None,
) -> BatchingManager:
    """Return the manager that the model keeps between calls if it was made under this patch; else a new one, not yet started.

    A patched model's `init_continuous_batching` calls it. tokenizer: for stop strings. conversations: where caches of ended
    requests go; if given, the manager is always new. A new one is noted in _MANAGERS, for `stop_managers`.
    """
    kept = vars(model).get(KEPT_MANAGER)  # transformers' attribute
    if conversations is None and isinstance(kept, BatchingManager) and kept.terms.settings is terms.settings:
        return kept
    generation_config = model.generation_config if generation_config is None else generation_config
    if generation_config.eos_token_id is None:  # the engine takes -1 for no end token
        generation_config = copy.deepcopy(generation_config)
        generation_config.eos_token_id = -1
    config = continuous_batching_config or getattr(generation_config, "continuous_batching_config", None)
    config = config if isinstance(config, ContinuousBatchingConfig) else ContinuousBatchingConfig()
    manager = BatchingManager(model, terms, generation_config, config, workload_hints, tokenizer, conversations)
    _MANAGERS.setdefault(model, weakref.WeakSet()).add(manager)
    return manager


def stop_managers(model: Any) -> None:
    """Stop the managers that still run; requests under way fail with an error.

    `end_continuous_batching` calls it when a patch is removed.
    """
    for manager in list(_MANAGERS.pop(model, ())):
        manager.over = True
        if manager.is_running():
            manager.stop(block=True, hard_stop=True)


_MANAGERS: weakref.WeakKeyDictionary[Any, weakref.WeakSet[BatchingManager]] = weakref.WeakKeyDictionary()


def _make_stops(strings: str | list[str] | None, tokenizer: Any) -> StopStringCriteria | None:
    """Return the criterion of stop strings for a new `BatchingManager`; None if there are none, or no tokenizer (a warning)."""
    if not strings:
        return None
    if tokenizer is None:
        _LOG.warning(
            "[kvpatch] stop_strings without a tokenizer are ignored, as transformers' continuous batching ignores them: give "
            "generate_batch() or init_continuous_batching() tokenizer=, or stop tokens (eos_token_id)."
        )
        return None
    return StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)


def _switch_off(config: ContinuousBatchingConfig) -> ContinuousBatchingConfig:
    """Return a copy of a configuration without the features of OFF, for `BatchingManager`; log those that it asked for."""
    switched_off, new, usual = [], copy.copy(config), ContinuousBatchingConfig()
    for name, value, what in OFF:
        if not hasattr(config, name):
            continue
        if getattr(config, name) not in (value, getattr(usual, name)):
            switched_off.append(what)
        setattr(new, name, value)
    say = _LOG.warning if switched_off else _LOG.info
    also = f"; so are {', '.join(dict.fromkeys(switched_off))}, which the configuration asked for" if switched_off else ""
    say(f"[kvpatch] continuous batching under a budget: prefix sharing and CPU offload are off{also}.")
    return new


def _on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Return a context in which work goes to a CUDA stream, that of the engine's passes; None: no stream, as on a CPU."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
