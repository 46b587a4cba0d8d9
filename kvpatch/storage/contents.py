"""Checks of a loaded cache: its invariants, and that its numbers are finite and its weights not negative."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import invariants
from ..cache.cache import EvictingCache
from ..cache.layer import SlotLayer
from ..cache.modes import Moving
from ..cache.tensors import HEAD_TENSORS
from ..cache.token_ids import UNKNOWN
from ..errors import InvalidError


def check_cache(cache: EvictingCache) -> None:
    """Raise InvalidError if a loaded cache contradicts itself, its policy or its budget, or holds a number that is not finite.

    `load` calls it for the filled cache. It also sets what the file does not hold: which heads lack slots, when heads evict
    next, and a reservation by room= (`plans.static_room`) if there are more free slots than decoding needs. Heads whose budget
    moves give surplus empty slots back.
    """
    # layers whose next token goes into a free slot: which heads may need more slots, and in how many steps heads evict
    slotted = [layer for layer in cache.layers if layer.mode.fills_free_slots]  # the others append
    for layer in slotted:
        layer.update_short_heads()
        layer.update_pace()
    invariants.check_state(cache)  # sizes, positions and counts agree
    if cache.ids.ids_BT is not None:
        invariants.must(cache.ids.ids_BT >= UNKNOWN, "ids holds a number that is no token")
    if cache.shared_score is not None:  # scores that all layers share
        _check_weights("shared", cache.shared_score)
    for name, state in cache.states.tensors().items():
        _check_finite(f"states.{name}", state)
    for index, layer in enumerate(cache.layers):
        _check_numbers(cache, index, layer)
        if isinstance(layer.mode, Moving):  # heads that have shrunk may have more slots than `check_bytes` allows
            layer.give_back_slots()  # empty ones, beyond some spare ones
    try:
        invariants.check_bytes(cache)
    except InvalidError:  # more free slots than without room=: take them for reserved, and check again
        free = [size - n for layer in slotted for size, n in zip(layer.kv.capacities(), layer.counts(), strict=True)]
        cache.plans.static_room = max(free, default=None)
        invariants.check_bytes(cache)


def _check_numbers(cache: EvictingCache, index: int, layer: SlotLayer) -> None:
    """Raise InvalidError, for `check_cache`, if keys, values or state of a layer's tokens are not finite, or weights negative.

    state: what the policy stores for each key. Weights are sums of attention probabilities and the like.
    """
    real, where, offsets = layer.positions >= 0, f"layer {index}", layer.kv.head_offsets  # real: slots [B,H,C] with a token
    slots = real if offsets is None else real.flatten(0, 1)[offsets.places()]  # the same, in the shape of keys and values
    if layer.kv.centre is not None:
        _check_finite(f"{where}: the centre of its keys", layer.kv.centre)
    # as floating-point numbers, also where they are stored rounded
    for name, tensor in zip(("keys", "values"), layer.kv.numbers(layer.kv.width), strict=True):
        finite = tensor.isfinite().all(-1) | ~slots
        invariants.must(finite, f"{where}: {name} are not finite")
    for need, note in layer.need_notes.items():  # what the policy remembers of the layer
        for name, tensor in vars(note).items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                _check_finite(f"{where}: {name} of {need}", tensor)
    policy = cache.settings.policies[index]
    # of the state, sums of attention probabilities and these others are never negative
    weights = (*policy.needs.statistics, "observed", "norm", "noise")
    for name, tensor in layer.state.items():
        (_check_weights if name in weights else _check_finite)(f"{where}: {name}", tensor[real])
    for kind in HEAD_TENSORS:  # a number for each head, such as its budget
        if (tensor := getattr(layer, kind.name)) is not None:
            _check_weights(f"{where}: {kind.name}", tensor)


def _check_finite(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.bool and not bool(tensor.isfinite().all()):
        raise InvalidError(f"{name} holds a number that is not finite")


def _check_weights(name: str, tensor: Tensor) -> None:
    if not bool((tensor.isfinite() & (tensor >= 0)).all()):
        raise InvalidError(f"{name} holds a number that is not finite or is negative")
