"""Names of transformers that it does not promise, in every spelling that a supported version has.

serving/engine.py, cli/serving.py and serving/vllm/ hold those of their engines. tests/arch/test_upstream.py compares these with
the installed version, and names the one that an upgrade has moved.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import Cache, GenerationMixin
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionLayer
from transformers.masking_utils import create_masks_for_generate
from transformers.pytorch_utils import Conv1D

__all__ = ["CacheLayerMixin", "Conv1D", "DynamicLayer", "LinearAttentionLayer", "create_masks_for_generate"]

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names under which models take and return their cache: "cache" since 5.24, which takes the others from callers until 5.40."""

PREPARE_CACHE = "_prepare_cache_for_generation"
"""The method in which generate() makes a cache."""
CANDIDATES = "_get_candidate_generator"
"""The method that makes the candidates of assisted decoding."""
MAKE_MASKS = "create_masks_for_generate"
"""The method that makes masks before a step that may be compiled."""
START_BATCHING = "init_continuous_batching"
"""The method that makes a manager of continuous batching."""
KEPT_MANAGER = "_cached_continuous_batching_manager"
"""The model's attribute that keeps a persistent manager."""
STEP_CALL = "__call__"
"""The model's attribute that generate() takes for its decode steps, where it does not compile them."""
COMPILED = ("_compiled_call", "_last_compile_config")
"""The model's attributes that keep a step which generate() has compiled."""


@functools.cache
def cache_argument(takes: Callable[..., Any]) -> str:
    """Return the name under which a model's forward takes the cache: its own parameter's, else the one that generate() uses."""
    parameters = inspect.signature(takes).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None) or CACHE


def cache_of(call: Mapping[str, Any]) -> Any:
    """Return the cache in a patched call's keyword arguments, or a model's output, by any of transformers' names; or None."""
    for name in CACHE_NAMES:
        if name in call and call[name] is not None:
            return call[name]
    return None


def set_cache(call: dict[str, Any], cache: Any, name: str) -> None:
    """Set `cache` as the only cache in a call's keyword arguments, in place. Patched decoders do so before they are run.

    name: of the argument; caches under transformers' other names are removed.
    """
    for other in CACHE_NAMES:
        call.pop(other, None)
    call[name] = cache


CACHE = cache_argument(GenerationMixin.prepare_inputs_for_generation)
"""The installed version's name of the cache."""


HYBRIDS = hasattr(Cache, "get_conv_state")
"""True if models ask their cache for the states of layers without keys; in 5.15 they take them from the cache's layers."""


def attention_of(config: Any) -> str:
    """Return the name of the attention function that a configuration asks for; of a patched module's copy, the original's."""
    return getattr(config, "_kvpatch_own", config)._attn_implementation


def name_attention(config: Any, name: str) -> None:
    """Set the name of a configuration's attention function, in place; the setter would change its sub-configurations too."""
    config._attn_implementation_internal = name


def keeps_state(kind: type) -> bool:
    """Tell if a model's class declares that it keeps a recurrent state, of which no token can be taken back."""
    return getattr(kind, "_is_stateful", False)


def mask_columns(generation_config: Any) -> int | None:
    """Return how many columns generate()'s padding mask has if generate() left it out, since it is all ones; else None."""
    return getattr(generation_config, "_mask_length", None)
