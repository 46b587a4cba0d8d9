"""Checks that a cache can be used under a patch: made by it, or by another of equal settings over equal shapes."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Cache

from ..arch.adapter import qualified_name
from ..arch.refusals import refuse_replaced
from ..arch.upstream import CACHE
from ..cache.cache import EvictingCache
from ..cache.model_stamp import ModelStamp
from ..cache.prefix import Prefix
from ..errors import KVPatchError
from ..policies.served import FeatureSet, refuse
from .identity import adapter_names, stamp_model
from .state import PatchState


def require_evicting_cache(past: object) -> EvictingCache:
    """Return a caller's cache `past` to `_choose_cache` and `_cache_for`; raise KVPatchError if it is no EvictingCache."""
    if isinstance(past, EvictingCache):
        return past
    kind = type(past).__name__
    if not isinstance(past, Cache):  # a tuple of keys and values, as older versions of transformers took
        made = "patch.new_cache(DynamicCache(past)), unless the policy scores by attention" if past else "patch.new_cache()"
        raise KVPatchError(f"{CACHE} is a {kind}, which transformers takes no more: give {made}.")
    if past.get_seq_length() == 0:
        raise KVPatchError(
            f"An empty {kind} was passed as {CACHE}; it would stay empty, for inside the block kvpatch's own cache "
            f"is filled. Leave {CACHE} out, or pass patch.new_cache(); if a model around the patched one made it in generate, "
            "patch that model."
        )
    raise KVPatchError(
        f"{CACHE} is a {kind} that was filled outside the block. Run the prompt inside the block, or convert the "
        "cache with patch.new_cache(past), which works for policies that do not score by attention."
    )


def check(cache: EvictingCache, state: PatchState) -> None:
    """Raise KVPatchError if a caller's cache was made under other settings or has other shapes.

    `_choose_cache` calls it before each pass, `StepGraph.step` before steps by a graph, `check_made_here` for the Patch.
    """
    if cache.settings is state.settings:
        return
    # the cache of a model that drafts with its first layers (early exit) has these layers alone
    for name, there, here in cache.settings.list_differences(state.settings.first_layers(cache.settings.numbers[-1] + 1)):
        raise KVPatchError(
            f"The cache was made under another patch: {name} is {there!r} there and {here!r} here. A cache goes on under the "
            "settings it was made with: make one with this patch.new_cache() and read the text again."
        )
    layer = cache.layers[0]
    if layer.is_initialized and state.settings.parallel.size == 1:
        check_shape((layer.positions.shape[1], layer.kv.sizes[0]), state)


def note_reader(cache: EvictingCache, decoder: nn.Module, state: PatchState) -> None:
    """Note in `cache.model_stamp` which model reads a new text; raise KVPatchError if another one, or a changed one, goes on.

    `_check_batch` calls it before each prompt. A scratch cache, which serves this pass alone, takes no note.
    """
    # an attention module, to see if another library has replaced its code
    attn = next((module for module in decoder.modules() if qualified_name(module) in state.adapter.classes), None)
    if attn is not None:  # FSDP gives a module that it wraps another class
        refuse_replaced(attn, state.adapter)
    if cache.for_one_pass:  # dropped after this pass
        return
    now = stamp_model(decoder)
    if len(now.adapters) > 1:
        _refuse_mixed(decoder, state)
    # measured: the stamp of the model when it was patched, with a calibration (statistics measured on it)
    if state.measured is not None and (changed := state.measured.differs(now)) is not None:
        name, there, here = changed
        raise KVPatchError(
            f"calibration= was checked when this model was patched, which has changed since: {name} is {there!r} there and "
            f"{here!r} here. Run `kvpatch calibrate` on this model, and patch it anew."
        )
    if cache.model_stamp is None or not cache.get_seq_length():  # a new text
        cache.model_stamp = now
    elif not cache.settings.transparent or cache.plans.copy_per_row:  # "full" checks only caches that start from a Prefix
        refuse_changed(cache, now)


def _refuse_mixed(decoder: nn.Module, state: PatchState) -> None:
    """Raise KVPatchError, for `note_reader`, if the policy scores by a projection that differs between rows.

    PEFT's adapter_names give each row of a batch its own adapter, which may change the projection's weight.
    """
    policy, name = state.settings.policy, state.adapter.projection  # its name; None: not known, so that any module counts
    if not policy.projects:
        return
    if not any(adapter_names(module) for path, module in decoder.named_modules() if name in (None, path.rpartition(".")[2])):
        return
    refuse("adapter_names=", FeatureSet(policy))


def refuse_changed(cache: EvictingCache, now: ModelStamp) -> None:
    """Raise KVPatchError, for `note_reader` and `save_cache`, if another model has read a cache, or this one before a change.

    now: the stamp (fingerprint) of this model as it is now.
    """
    changed = None if cache.model_stamp is None else cache.model_stamp.differs(now)
    if changed is None:
        return
    name, there, here = changed
    what, anew = ("prefix", "patch.prefix(ids)") if cache.plans.copy_per_row else ("cache", "a cache of patch.new_cache()")
    raise KVPatchError(
        f"Another model has read this {what}, or this model has changed since: {name} is {there!r} there and {here!r} here. "
        f"Read the text by this one, with {anew}."
    )


def start_from_prefix(prefix: Prefix, state: PatchState) -> EvictingCache:
    """Return a new cache for texts that begin with `prefix`, of one row; the first pass repeats it for each text.

    `before_decoder` and `_run_with_cache` call it where a Prefix is given in place of a cache. The prefix stays as it is.

    Raises:
        KVPatchError: the prefix was read under other settings.
    """
    cache = prefix.copy()
    cache.plans.copy_per_row = True
    check(cache, state)
    return cache


def check_made_here(cache: object, state: PatchState) -> None:
    """Raise KVPatchError, for `save_cache`, `replace_span` and `find_record`, if `cache` is no EvictingCache of this patch."""
    if isinstance(cache, Prefix):
        raise KVPatchError("Other texts share a Prefix: give its copy(), which is a cache of its own.")
    if not isinstance(cache, EvictingCache):
        raise KVPatchError(
            f"This is a {type(cache).__name__}: give a cache that the patched model filled, such as patch.new_cache() after a "
            f"prompt, or {CACHE} of its output."
        )
    check(cache, state)


def check_shape(found: tuple[int, int], state: PatchState) -> None:
    """Raise KVPatchError, for `check` and `check_layers`, if a cache's KV heads and head size (`found`) are not the model's."""
    wanted, (H, D) = state.shapes[0][:2], found
    if found != wanted:
        raise KVPatchError(
            f"The cache holds {H} KV heads of {D} numbers, as another model made it; this model has {wanted[0]} of "
            f"{wanted[1]}. Make one with this model's own patch.new_cache()."
        )


def check_layers(past: Cache, state: PatchState) -> None:
    """Raise KVPatchError if a transformers cache's shapes show that another model has filled it.

    `Patch.new_cache`, `Patch.compress` and generate() (`_cache_for`) call it before they convert the cache.
    """
    if isinstance(past, EvictingCache) or not isinstance(past, Cache) or not hasattr(past, "layers"):
        return  # the conversion raises the error
    first = past.layers[0] if past.layers else None
    keys, values = getattr(first, "keys", None), getattr(first, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.ndim != 4 or state.settings.parallel.size > 1:
        return
    shape, sizes = state.shapes[0], (keys.shape[-1], values.shape[-1])
    # latent attention (DeepSeek): one compressed entry for all heads, which the patch expands if it cannot read the weight
    if not shape.latent and keys.shape[1] == 1 < shape.heads and sizes != shape[1:3]:
        raise KVPatchError(
            f"past holds one entry for all heads of a layer, of {sizes[0]} and {sizes[1]} numbers, as latent attention does; "
            "but this patch holds expanded keys and values, for the weight of kv_b_proj cannot be read (it is quantized, "
            "wrapped, offloaded or sharded): run the prompt inside the block."
        )
    check_shape((keys.shape[1], sum(sizes) if shape.latent else sizes[0]), state)
