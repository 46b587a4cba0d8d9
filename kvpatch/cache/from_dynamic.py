"""Conversion of a transformers cache that an unpatched prompt filled, where that is exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..errors import KVPatchError
from ..policies.context import NewTokens
from ..policies.served import refuse
from .forward_context import find_places
from .state import TextState, writable


@writable
def absorb(cache: TextState, past: Cache, mask_BT: Tensor | None = None, ids_known: bool = False) -> None:
    """Copy the keys and values of `past`, a user's cache of an unpatched model, into an empty `cache`, to go on from it.

    new_cache(past=), compress() and generate() call this. Nothing is evicted until more of the prompt has been read, or
    compress() ends it. mask_BT: padding mask. ids_known: the caller knows the token ids of `past`, which a policy needs that
    reads a prompt a second time.

    Raises:
        KVPatchError: the policy needs more than keys and values, or `past` has dropped tokens.
    """
    cache.refuse_unfinished()
    _check_past(cache, past, ids_known)
    seen, entries = int(past.get_seq_length()), []  # int: a static cache counts in a tensor, and adds to it
    for index, (_, past_layer) in enumerate(zip(cache.layers, past.layers, strict=True)):
        keys: Any = getattr(past_layer, "keys", None)
        values: Any = getattr(past_layer, "values", None)
        window, latent = cache.settings.bounds[index], cache.settings.latent[index]  # the layer's own window
        readable = isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.ndim == 4  # else they are quantized
        if not readable or (keys.shape[2] < seen and (window is None or keys.shape[2] < window - 1)):
            raise KVPatchError(
                f"Layer {index} of the {type(past).__name__} no longer holds every token as it was seen: its window is smaller "
                "than the text, or it rounds. Read the prompt inside the block, or into DynamicCache(), without config=."
            )
        keys, values = keys[:, :, :seen], values[:, :, :seen]  # of a static cache, whose others are free
        # transformers has the latent as keys and the rotary part as values: here a key is both, and the latent its value
        entries.append((torch.cat([keys, values], -1), keys) if latent else (keys, values))
    with cache.changing("absorb()"):  # marks the cache as unfinished meanwhile
        cache.lifetimes = None  # the ids and deaths of these tokens were not recorded
        _fill_layers(cache, entries, seen, mask_BT)


def _fill_layers(cache: TextState, taken: list[tuple[Tensor, Tensor]], seen: int, mask_BT: Tensor | None) -> None:
    """Append a user's keys and values [B,H,T,D] to the layers of an empty cache, and set its rows' lengths and padding.

    `absorb` calls it. taken: the pair of each layer, of the last T of `seen` columns; T < seen under a sliding window. mask_BT:
    False for padding.
    """
    cache.count_in(taken[0][0].dtype)  # turns a budget in bytes into tokens
    for index, (layer, (keys, values)) in enumerate(zip(cache.layers, taken, strict=True)):
        B, H, T, _ = keys.shape
        real = torch.ones(B, seen, dtype=torch.bool, device=keys.device)
        if mask_BT is not None:
            real = mask_BT[:, :seen].to(keys.device).bool()
        # positions of all columns: padding has that of the token before it, or its own in models that count columns
        places = find_places(real, torch.zeros(B, dtype=torch.long, device=keys.device), cache.settings.by_columns)
        positions = places.masked_fill(~real, -1)[:, -T:]
        # what the policy stores with each token, beside key and value
        extras, settings = {}, cache.settings
        if settings.evicts[index]:
            # first(): the number of the first of these heads in the whole model
            tokens = NewTokens(keys, values, positions, 1, index, settings.seed, settings.parallel.first(H))
            extras = settings.policies[index].entry(tokens)
        layer.append(keys, values, positions, extras)
        layer.columns_read, layer.may_have_empty = seen, not bool(real.all())
        if layer.may_have_empty:  # as a pass of the patch describes its padding (attention/prefill.py)
            real_held = real[:, -T:]
            layer.first_croppable = int((~real_held * torch.arange(1, T + 1, device=real_held.device)).amax())
            layer.in_text_order = not bool((real_held[:, :-1] & ~real_held[:, 1:]).any())  # no padding after a token
        if index == 0:
            cache.seen_B, gaps_B = places[:, -1] + 1, ((places >= 0) & ~real).sum(-1)
            cache.rows.padded = layer.may_have_empty
            cache.ids.write(None, B, seen, cache.seen_B.device, real)  # which columns are padding, for masks to come
            if cache.settings.by_columns and bool(gaps_B.any()):
                cache.rows.gaps_B, cache.rows.by_columns = gaps_B, True


def _check_past(cache: TextState, past: Cache, ids_known: bool) -> None:
    """Raise KVPatchError unless `past`, a user's cache, can be taken over and continued exactly. ids_known: see `absorb`.

    `absorb` and `compress_past` call it before anything changes.
    """
    kind, settings = type(past).__name__, cache.settings
    if not isinstance(past, Cache) or not hasattr(past, "layers"):  # an EncoderDecoderCache is two caches
        raise KVPatchError(f"past={past!r:.60} is a {kind}: give a DynamicCache, as an unpatched model makes it.")
    if isinstance(past, TextState):
        raise KVPatchError(f"past is a {kind}, which is on a budget already: use its clone().")
    refuse("a filled cache", settings.list_features(past=kind, unknown=not ids_known))  # raises if settings exclude it
    if len(past.layers) != len(cache.layers):
        raise KVPatchError(
            f"past has {len(past.layers)} layers, but this model has {len(cache.layers)}: give a cache that this model filled."
        )
