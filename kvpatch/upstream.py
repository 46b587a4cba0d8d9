"""Names of transformers that it does not promise, in every spelling that a supported version has.

serving/engine.py and serving/vllm/ hold those of their engines. tests/arch/test_upstream.py compares all of these with the
installed version, and fails by name where one has moved.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationMixin

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names under which models take and return their cache: "cache" since 5.24, for which callers may write the others too."""


@functools.cache
def cache_argument(takes: Callable[..., Any]) -> str:
    """Return the name under which a function takes the cache: its own parameter's, else the one that generate() uses."""
    parameters = inspect.signature(takes).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None) or CACHE


def cache_of(call: Mapping[str, Any]) -> Any:
    """Return the cache among keyword arguments or in a model's output, under any of its names; None if there is none."""
    for name in CACHE_NAMES:
        if name in call and call[name] is not None:
            return call[name]
    return None


def set_cache(call: dict[str, Any], cache: Any, name: str) -> None:
    """Make `cache` the one that keyword arguments hold, under `name` alone."""
    for other in CACHE_NAMES:
        call.pop(other, None)
    call[name] = cache


CACHE = cache_argument(GenerationMixin.prepare_inputs_for_generation)
"""The installed version's name of the cache."""

PREPARE_CACHE = "_prepare_cache_for_generation"
"""The method in which generate() makes a cache."""
MAKE_MASKS = "create_masks_for_generate"
"""The method that makes masks before a step that may be compiled."""
START_BATCHING = "init_continuous_batching"
"""The method that makes a manager of continuous batching."""
KEPT_MANAGER = "_cached_continuous_batching_manager"
"""The model's attribute that keeps a persistent manager."""
