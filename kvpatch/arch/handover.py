"""What an attention module gets in place of its cache, where kvpatch writes keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Handover:
    """Stand-in for a module's cache: `update` returns keys and values unchanged, and the core writes them."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that the cache has seen."""
        return self.cache.get_seq_length(layer_idx)
