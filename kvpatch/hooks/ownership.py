"""Checks that a cache can be used under a patch: made by it, or by another of equal settings over equal shapes."""

from __future__ import annotations

from torch import Tensor
from transformers import Cache

from ..cache.cache import EvictingCache
from ..cache.prefix import Prefix
from ..errors import KVPatchError
from ..upstream import CACHE
from .state import PatchState


def check(cache: EvictingCache, state: PatchState) -> None:
    """Raise KVPatchError if `cache` belongs to another patch."""
    if cache.settings is state.settings:
        return
    for name, there, here in cache.settings.differences(state.settings.first_layers(cache.settings.numbers[-1] + 1)):
        raise KVPatchError(
            f"The cache was made under another patch: {name} is {there!r} there and {here!r} here. A cache goes on under the "
            "settings it was made with: make one with this patch.new_cache() and read the text again."
        )
    layer = cache.layers[0]
    if layer.is_initialized and state.settings.parallel.size == 1:
        check_shape((layer.positions.shape[1], layer.kv.sizes[0]), state)


def begun(prefix: Prefix, state: PatchState) -> EvictingCache:
    """Return a cache for texts that begin with `prefix`; its first pass makes a row of each.

    Raises:
        KVPatchError: it was read by another model, or under other settings.
    """
    cache = prefix.copy()
    cache.request.spread = True
    if cache.settings is not state.settings:
        check(cache, state)
        here = state.identity()
        for name, there in prefix.identity.items():
            if there != here.get(name):
                raise KVPatchError(
                    f"Another model has read this prefix: {name} is {there!r} there and {here.get(name)!r} here. Read it "
                    "by this one, with patch.prefix(ids)."
                )
    return cache


def check_own(cache: object, state: PatchState) -> None:
    """Raise KVPatchError if `cache` is no EvictingCache of this patch."""
    if not isinstance(cache, EvictingCache):
        raise KVPatchError(
            f"This is a {type(cache).__name__}: give a cache that the patched model filled, such as patch.new_cache() after a "
            f"prompt, or {CACHE} of its output."
        )
    check(cache, state)


def check_shape(found: tuple[int, int], state: PatchState) -> None:
    """Raise KVPatchError if the KV heads and the head size of a layer are not the model's."""
    wanted, (H, D) = state.shapes[0][:2], found
    if found != wanted:
        raise KVPatchError(
            f"The cache holds {H} KV heads of {D} numbers, as another model made it; this model has {wanted[0]} of "
            f"{wanted[1]}. Make one with this model's own patch.new_cache()."
        )


def check_layers(past: Cache, state: PatchState) -> None:
    """Raise KVPatchError if another model has filled a transformers cache."""
    if isinstance(past, EvictingCache):
        return  # the conversion raises the error
    first = past.layers[0] if past.layers else None
    keys, values = getattr(first, "keys", None), getattr(first, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.ndim != 4 or state.settings.parallel.size > 1:
        return
    shape, sizes = state.shapes[0], (keys.shape[-1], values.shape[-1])
    if not shape.latent and keys.shape[1] == 1 < shape.heads and sizes != shape[1:3]:
        raise KVPatchError(
            f"past holds one entry for all heads of a layer, of {sizes[0]} and {sizes[1]} numbers, as latent attention does; "
            "but this patch holds expanded keys and values, for the weight of kv_b_proj cannot be read (it is quantized, "
            "wrapped, offloaded or sharded): run the prompt inside the block."
        )
    check_shape((keys.shape[1], sum(sizes) if shape.latent else sizes[0]), state)
