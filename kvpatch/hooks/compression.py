"""Compression of a cache that a prompt was read into before, as the end of that prompt would have compressed it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from ..arch.bound import BoundAdapter
from ..attention import anomaly, compress
from ..attention.layer_call import Call
from ..cache import from_dynamic, passes
from ..cache.cache import EvictingCache
from ..errors import KVPatchError
from ..policies.served import refuse
from . import decoder, ownership
from .identity import stamp_model
from .second_reading import check_second_reading, read_again
from .state import PatchState
from .target import Target


def compress_past(target: Target, state: PatchState, past: Any, ids: Any, mask: Any) -> EvictingCache:
    """Return a new cache under the budget with what the policy keeps of `past`, for `Patch.compress`; `past` stays as it is.

    past: a DynamicCache, or an EvictingCache that has evicted nothing. ids, mask: its tokens [B,T] and padding mask [B,T], or
    None. Scores are computed from keys and values alone, or by a second reading of the prompt if the policy asks for one.
    """
    refuse("compress", state.list_features())
    by_columns = isinstance(past, EvictingCache) and past.rows.by_columns  # its positions count padding columns
    if isinstance(past, EvictingCache):
        past, mask = _take_entries(past)
    _check_past(target.decoder, state, past, ids, mask)
    cache, devices = state.new_cache(), target.devices()
    with torch.inference_mode(False), torch.no_grad():
        from_dynamic.absorb(cache, past, mask, ids_known=ids is not None)  # copies the keys and values
        cache.model_stamp = stamp_model(target.decoder)
        ids_BN = ids if ids is None or mask is None else ids.masked_fill(mask.to(ids.device) == 0, -1)
        # begin a pass without tokens, which ends the prompt; now: facts about it
        now = passes.begin_compression(cache, ids_BN, decoder.table_maker(target.decoder, state, devices[0]))
        if by_columns:
            # positions in `past` counted padding columns too, so the next token's is higher by these
            now.position_offset_B1 = past.get_seq_length() - cache.lengths_B[:, None]
        _end_prompt(target, cache, devices)
        if now.reread_ids_BN is None:
            passes.end_pass(cache)
        else:  # tokens of the prompt that the policy asks to read a second time; layers evict after that
            read_again(target.decoder, cache, state, now.reread_ids_BN)
    if cache.settings.strict:
        anomaly.check_cache(cache)
    return cache


_EMPTY = "past has read nothing yet: call the model with it first."


def _end_prompt(target: Target, cache: EvictingCache, devices: list[torch.device]) -> None:
    """Evict from each layer of `cache` in place, for `compress_past`, with the code that ends a prompt in a forward pass.

    No queries are at hand. Policies that score by them are refused, unless they read the prompt a second time: then layers do
    not evict here but later, in `read_again`. devices: that of each layer.
    """
    shapes, now = target.shapes(), cache.current_pass
    for layer, (module, adapter) in enumerate(target.attentions):
        shape = shapes[layer]
        call = Call(cache, now, layer, BoundAdapter(adapter, module, shape.heads), shape.group or 1, devices[layer])
        call.slots.sliding = call.geometry.sliding  # the layer's sliding window, or None
        protected_B = compress.set_limits(call) if call.evicts and not now.keeps_all else []  # tokens by row
        # evicts; layers that share a budget wait for the last
        compress.end_prompt(call, call.slots.columns_used, protected_B)


def _take_entries(past: EvictingCache) -> tuple[DynamicCache, Tensor]:
    """Return (copy, mask) of an EvictingCache, for `compress_past`: its keys and values, and its padding mask [B,T].

    Raises:
        KVPatchError: it may have evicted something, or is empty.
    """
    settings = past.settings
    if settings.acts or settings.renumbered or any(bound is not None for bound in settings.bounds):
        raise KVPatchError(
            f"past is a cache under policy {settings.policy.name!r}, which may have dropped tokens: give one that the "
            "unpatched model filled, or one under policy 'full' of a model without sliding windows."
        )
    with past.reading("compress()"):  # raises if another thread changes it meanwhile
        if not past.get_seq_length():
            raise KVPatchError(_EMPTY)
        taken = DynamicCache()
        for layer, slots in enumerate(past.layers):
            dense = slots.kv.make_dense(*slots.positions.shape[:2])  # [B,H,T,D], also of heads of different lengths
            taken.update(*dense.as_transformers(slots.columns_used), layer)
        return taken, past.layers[0].positions[:, 0, : past.layers[0].columns_used] >= 0


def _check_past(model: nn.Module, state: PatchState, past: Any, ids: Any, mask: Any) -> None:
    """Raise KVPatchError, for `compress_past` before it makes a cache, if it cannot take this `past`, token ids or mask."""
    settings, shape = state.settings, None
    if isinstance(past, Cache) and hasattr(past, "layers"):  # else `absorb` refuses it
        if not past.get_seq_length():
            raise KVPatchError(_EMPTY)
        ownership.check_layers(past, state)
        keys = getattr(past.layers[0], "keys", None)
        shape = None if keys is None else (len(keys), past.get_seq_length())
    for name, given in (("ids", ids), ("attention_mask", mask)):
        if given is not None and (not isinstance(given, Tensor) or (shape is not None and given.shape != shape)):
            found = list(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise KVPatchError(f"{name} is {found}: give the tensor {list(shape or ('B', 'T'))} that `past` was filled with.")
    if isinstance(mask, Tensor):
        passes.refuse_mask(mask)
    if ids is not None and settings.rereads:
        if getattr(model, "_kvpatch", None) is None:
            raise KVPatchError(
                f"Policy {settings.policy.name!r} reads the prompt a second time: call compress() inside the block."
            )
        if shape is not None and state.max_positions is not None:
            check_second_reading(settings, shape[1], shape[1], state.max_positions)
