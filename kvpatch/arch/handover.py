"""Stand-ins for the cache that a module updates before it attends. They store nothing: the core writes what they return.

The core is attention through kvpatch's cache, which the module calls next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Handover:
    """Stand-in for a module's cache: `update` returns keys and values unchanged, and the core writes them to `cache`."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged, without those of earlier tokens; the module's forward calls it."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that the cache has seen."""
        return self.cache.get_seq_length(layer_idx)


class Entries:
    """Stand-in for the cache of latent attention: `update` returns each token's entry in place of its latent."""

    def update(self, latent: Tensor, rotary: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the entries [B,1,Q,R+D], which are a latent and a rotary key each, and the rotary keys unchanged."""
        return torch.cat([latent, rotary], -1), rotary
