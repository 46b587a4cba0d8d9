"""Checks that caches can be joined into one (concat.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arch.upstream import CACHE
from ..errors import KVPatchError
from .state import TextState


def check_compatible(caches: Sequence[TextState]) -> None:
    """Raise KVPatchError if caches cannot be joined into one. `join_texts` calls this before it changes anything."""
    if not isinstance(caches, Sequence):
        raise KVPatchError(f"EvictingCache.concatenate takes a list of caches, not {type(caches).__name__}: give [cache].")
    if not caches:
        raise KVPatchError("EvictingCache.concatenate was given no cache: give a list with at least one.")
    if len({id(cache) for cache in caches}) < len(caches):
        raise KVPatchError("A cache is in the list twice: give its clone(), or repeat its rows with batch_repeat_interleave().")
    for index, cache in enumerate(caches):
        if not isinstance(cache, TextState):
            raise KVPatchError(
                f"Cache {index} is a {type(cache).__name__}: only caches that the patched model filled can be concatenated: "
                f"give {CACHE} of its output."
            )
        cache.refuse_unfinished()
        cache.catch_up()
        _check_one(index, cache)
        _check_same(index, caches[0], cache)
        _check_reader(index, caches[0], cache)


def _check_one(index: int, cache: TextState) -> None:
    """For `check_compatible`: raise KVPatchError if a cache cannot be joined with any other. index: its place in the list."""
    if cache.turns.unfinished:  # a prompt is not read to its end
        raise KVPatchError(f"Cache {index} is in the middle of a prompt: read it to its end, then concatenate.")
    if not cache.turns.prompts_read or cache.seen_B is None:
        raise KVPatchError(f"Cache {index} has read no prompt: run one through it first.")
    if cache.plans.static_room is not None:
        raise KVPatchError(
            f"Cache {index} was made with room={cache.plans.static_room} (or by a generate() that compiles), for buffers that "
            "never change: concatenating makes new ones. Make it without room."
        )
    if cache.counts_padding:
        raise KVPatchError(
            f"Cache {index} has rows with padding, and a pass without position_ids, so that its positions count the padding, "
            "which is gone here: pass position_ids each time (attention_mask.cumsum(-1) - 1 for a prompt, as generate() does, "
            "and cache.next_positions() for a token), or read the prompts unpadded."
        )


def _check_same(index: int, first: TextState, cache: TextState) -> None:
    """For `check_compatible`: raise KVPatchError if caches to be joined differ in settings, or in number or kind of layers."""
    in_first, in_this = _list_sizes(first), _list_sizes(cache)
    sizes = ((name, in_first.get(name), in_this.get(name)) for name in dict.fromkeys((*in_first, *in_this)))
    # list_differences(): (name, value of cache 0, value of this cache)
    for name, value_0, value in (*first.settings.list_differences(cache.settings), *sizes):
        if value_0 != value:
            raise KVPatchError(
                f"Cache {index} was made under another patch or model than cache 0: {name} is {value!r} there and {value_0!r} "
                "here. Rows of one batch share all settings. Read both texts under one patch."
            )


def _check_reader(index: int, first: TextState, cache: TextState) -> None:
    """For `check_compatible`: raise KVPatchError if two models read the caches, or weights changed; adapters may differ.

    `model_stamp`: a fingerprint of the model that has read a cache; None: not known, and nothing is checked.
    """
    stamp, first_stamp = cache.model_stamp, first.model_stamp
    # differs(): (what, there, here), or None if nothing differs
    changed = None if stamp is None or first_stamp is None else stamp.with_adapters(first_stamp.adapters).differs(first_stamp)
    if changed is not None:
        raise KVPatchError(
            f"Cache {index} was read by another model than cache 0, or its {changed[0]} have changed in between: read "
            "both texts by this model."
        )


def _list_sizes(cache: TextState) -> dict[str, Any]:
    """For `_check_same`: return by name what joined caches have in common: their number of layers, and each layer's sizes."""
    described: dict[str, Any] = {"number of layers": len(cache.layers)}
    for index, layer in enumerate(cache.layers):
        sizes = {"KV heads": layer.positions.shape[1], "head sizes": layer.kv.sizes}
        facts = {**sizes, "dtype": layer.dtype, "device": str(layer.positions.device)}
        described |= {f"layer {index}'s {name}": value for name, value in facts.items()}
    return described
