"""Whether a cache can go on under a patch: one that it made, or another of the same settings over the same shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Cache

from ..cache.cache import EvictingCache
from ..errors import KVPatchError
from ..storage.save_load import settings_of

if TYPE_CHECKING:
    from .decoder import Settings


def check(cache: EvictingCache, settings: Settings) -> None:
    """Raise KVPatchError where `cache` belongs to another patch."""
    if cache.origin == settings.origin:
        return
    _check_settings(settings_of(cache), settings_of(settings.new_cache(len(cache.layers))))
    layer = cache.layers[0]
    if layer.is_initialized and layer.keys is not None and settings.parallel.size == 1:
        check_shape(layer.keys, layer.positions.shape[1], settings)


def check_own(cache: object, settings: Settings) -> None:
    """Raise KVPatchError where `cache` is none of ours."""
    if not isinstance(cache, EvictingCache):
        raise KVPatchError(
            f"This is a {type(cache).__name__}: give a cache that the patched model filled, such as patch.new_cache() after a "
            "prompt, or past_key_values of its output."
        )
    check(cache, settings)


def check_shape(keys: Tensor, H: int, settings: Settings) -> None:
    """keys: of any layer, with H heads."""
    wanted, D = settings.kv_shape, keys.shape[-1]
    if (H, D) != wanted:
        raise KVPatchError(
            f"The cache holds {H} KV heads of {D} numbers, as another model made it; this model has {wanted[0]} of "
            f"{wanted[1]}. Make one with this model's own patch.new_cache()."
        )


def _check_settings(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    mine, theirs = ({**one.pop("policy"), **one} for one in (mine, theirs))
    for name, here in theirs.items():
        if mine.get(name) != here:
            raise KVPatchError(
                f"The cache was made under another patch: its {name} is {mine.get(name)!r} there and {here!r} here. A cache "
                "goes on under the settings it was made with: make one with this patch.new_cache() and read the text again."
            )


def check_layers(past: Cache, settings: Settings) -> None:
    """Raise KVPatchError where another model has filled a transformers cache."""
    if isinstance(past, EvictingCache):
        return  # what takes over has the words
    keys = getattr(past.layers[0], "keys", None) if past.layers else None
    if isinstance(keys, Tensor) and keys.ndim == 4 and settings.parallel.size == 1:
        check_shape(keys, keys.shape[1], settings)
