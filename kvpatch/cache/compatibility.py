"""Which caches can be rows of one (joining.py), and where the rows of one go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import KVPatchError
from ..storage.save_load import settings_of
from .cache import EvictingCache
from .layer import SlotLayer

MISPLACED = (
    "position_ids do not go on from what each row of this concatenated cache has seen: leave them out, or pass "
    "cache.next_positions()."
)


def check(caches: Sequence[EvictingCache]) -> None:
    """Raise KVPatchError where these cannot be rows of one cache."""
    if not isinstance(caches, Sequence):
        raise KVPatchError(f"EvictingCache.concatenate takes a list of caches, not {type(caches).__name__}: give [cache].")
    if not caches:
        raise KVPatchError("EvictingCache.concatenate was given no cache: give a list with at least one.")
    if len({id(cache) for cache in caches}) < len(caches):
        raise KVPatchError("A cache is in the list twice: give its clone(), or repeat its rows with batch_repeat_interleave().")
    for index, cache in enumerate(caches):
        if not isinstance(cache, EvictingCache):
            raise KVPatchError(
                f"Cache {index} is a {type(cache).__name__}: only caches that the patched model filled can be concatenated: "
                "give past_key_values of its output."
            )
        cache.check_whole()
        cache.catch_up()
        _check_one(index, cache)
        _check_same(index, caches[0], cache)


def _check_one(index: int, cache: EvictingCache) -> None:
    if cache.turn_open:
        raise KVPatchError(f"Cache {index} is in the middle of a prompt: read it to its end, then concatenate.")
    if not cache.turns or cache.seen_B is None:
        raise KVPatchError(f"Cache {index} has read no prompt: run one through it first.")
    if cache.room is not None:
        raise KVPatchError(
            f"Cache {index} was made with room={cache.room} (or by a generate() that compiles), for buffers that never change: "
            "concatenating makes new ones. Make it without room."
        )
    if cache.by_columns:
        raise KVPatchError(
            f"Cache {index} read a padded batch without position_ids, so that its positions count the padding, which is gone "
            "here: pass position_ids (attention_mask.cumsum(-1) - 1, as generate() does), or read the prompts unpadded."
        )


def _check_same(index: int, first: EvictingCache, cache: EvictingCache) -> None:
    mine, theirs = _described(cache), _described(first)
    for name in [*theirs, *(name for name in mine if name not in theirs)]:
        if mine.get(name) != theirs.get(name):
            raise KVPatchError(
                f"Cache {index} was made under another patch or model than cache 0: {name} is {mine.get(name)!r} there and "
                f"{theirs.get(name)!r} here. Rows of one batch share all settings. "
                "Read both texts under one patch."
            )


def _described(cache: EvictingCache) -> dict[str, Any]:
    settings = settings_of(cache)
    of_policy = {f"the policy's {name}": value for name, value in settings.pop("policy").items()}
    of_layers = {f"layer {index}'s {name}": value for index, layer in enumerate(cache.layers) for name, value in _shape(layer)}
    return {**of_policy, **settings, "number of layers": len(cache.layers), **of_layers}


def _shape(layer: SlotLayer) -> list[tuple[str, object]]:
    assert layer.keys is not None and layer.values is not None
    sizes = layer.keys.shape[-1], layer.values.shape[-1]
    device = str(layer.positions.device)
    return [("KV heads", layer.positions.shape[1]), ("head sizes", sizes), ("dtype", layer.dtype), ("device", device)]


def place(call: dict[str, Any], cache: EvictingCache, Q: int, mask_BT: Tensor | None, known: tuple[str, ...]) -> None:
    """Give a decoder the position_ids of Q new tokens per row, for its own are the same for all rows; `call` are its
    arguments, of which it knows those by the names `known`.

    Raises:
        KVPatchError: it was given others, or takes none and needs some.
    """
    geometry = cache.layers[0].geometry
    if "position_ids" not in known:
        if geometry is None or geometry.slopes_HG is None:
            raise KVPatchError(
                "Rows of a concatenated cache are at different places of their texts, which this model's decoder cannot be "
                "told, for it takes no position_ids: continue the caches one by one."
            )
        return
    given, wanted = call.get("position_ids"), cache.next_positions(Q)
    real = None if mask_BT is None else mask_BT[:, -Q:].to(wanted.device).bool()
    if real is not None and real.shape == wanted.shape and Q > 1:  # a padded prompt
        wanted = (wanted[:, :1] + real.long().cumsum(-1) - 1).clamp(min=0)
    if given is None:
        call["position_ids"] = wanted
    elif given.shape[-1] == Q and given.shape[0] in (1, len(wanted)):
        wrong = given.to(wanted.device) != wanted
        wrong = wrong if real is None or real.shape != wrong.shape else wrong & real
        if wanted.device.type != "cpu" or torch.compiler.is_compiling():  # asserted on the device, without waiting for it
            torch._assert_async(~wrong.any(), MISPLACED)
        elif bool(wrong.any()):
            row = int(wrong.any(-1).nonzero()[0])
            raise KVPatchError(f"{MISPLACED} Row {row} has seen {int(cache.next_positions()[row])} tokens.")
