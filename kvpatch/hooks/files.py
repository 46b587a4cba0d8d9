"""Caches in files: checks before one is written, and what a cache that was read from a file takes from the model."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch

from ..arch.bound import BoundAdapter
from ..cache.cache import EvictingCache
from ..cache.lossless import LosslessCache
from ..errors import KVPatchError
from ..storage.lossless import load_lossless, save_lossless
from ..storage.save_load import load, save
from . import lossless, ownership
from .identity import describe_rotation, stamp_model
from .inputs import check_path
from .offsets import clear_offsets
from .state import PatchState
from .target import Target


def save_cache(target: Target, state: PatchState, cache: Any, path: str | PathLike[str]) -> None:
    """Check that a cache is the patch's own and its model unchanged, and write it to a file, for `Patch.save_cache`."""
    if state.lossless and cache is not None:  # check_made_here refuses None
        lossless_cache = lossless.require_lossless_cache(cache, state)
        # `drafts`, the budgeted cache beside the host's entries, has the model's stamp
        ownership.refuse_changed(lossless_cache.drafts, stamp_model(target.decoder))
        return save_lossless(lossless_cache, check_path(path), _identify(target))
    ownership.check_made_here(cache, state)
    ownership.refuse_changed(cache, stamp_model(target.decoder))
    if cache.ids.offset:  # positions are shifted after images
        raise KVPatchError(
            "This cache has read images, after which the model counts positions otherwise, and a file does not say how: keep "
            "the cache, or read the text and its images anew."
        )
    return save(cache, check_path(path), _identify(target))


def load_cache(target: Target, state: PatchState, path: str | PathLike[str]) -> EvictingCache | LosslessCache:
    """Fill a new cache of the patch from a file, and return it, for `Patch.load_cache`; under lossless=True a LosslessCache.

    What the file does not hold is taken from the model: its stamp (a fingerprint), devices, and each layer's geometry.
    """
    if state.lossless:
        loaded = load_lossless(
            lossless.new_cache(state), check_path(path), _identify(target), target.shapes(), target.devices()
        )
        loaded.drafts.model_stamp = stamp_model(target.decoder)
        return loaded
    cache = load(state.new_cache(), check_path(path), _identify(target), target.shapes(), target.devices())
    cache.lifetimes = None  # when tokens were evicted, for `record=True`: the file does not say
    cache.model_stamp = stamp_model(target.decoder)
    cache.states.place(target.state_devices())
    clear_offsets(target.outer, cache)  # of positions after images, which a file never holds
    with torch.no_grad():  # geometry comes from the model; concatenate() compares it
        for layer, (module, adapter) in zip(cache.layers, target.attentions, strict=True):
            layer.geometry = BoundAdapter(adapter, module, layer.positions.shape[1]).geometry(layer.device)
    return cache


def _identify(target: Target) -> dict[str, Any]:
    """Return the values by which a file knows its model: those of `Target.identity`, and how keys are rotated."""
    return target.identity() | describe_rotation(target.decoder)
