"""Capacity classes: slots of a layer rounded up, so that caches after prompts of different lengths have tensors of equal shape.

A captured step (graph.py) works on tensors of fixed shapes. Under a share of the prompt, and where decode steps only add
tokens, the number of slots follows the length of the prompt. It is rounded up to a multiple of a sixteenth of the power of two
below it, at least 8: sixteen classes for each doubling, and no more empty slots than a cache may have anyway (cache/growth.py).
The added slots are empty; attention masks them, and a head still evicts as soon as it holds more than its budget.
"""

from __future__ import annotations

from dataclasses import replace

from ..cache.cache import EvictingCache
from ..cache.growth import LEAST, PART
from ..cache.layer import SlotLayer
from ..cache.modes import Evicting, Growing
from ..cache.slots import DenseSlots
from ..policies.budgets import Size
from ..policies.context import Limits


def round_capacity(slots: int) -> int:
    """Round a number of slots up to the next class (16 to a doubling), so that caches after similar prompts have equal shapes.

    Example:
        >>> round_capacity(13), round_capacity(2001), round_capacity(2048)
        (16, 2048, 2048)
    """
    step = max(LEAST, (1 << slots.bit_length() - 1) // PART)  # LEAST = 8, PART = 16, of the power of two below
    return -(-slots // step) * step


def round_capacities(cache: EvictingCache) -> None:
    """Round up the number of slots (places for tokens) of a cache's layers, so that similar prompts share a CUDA graph.

    `StepGraph._find_captured` calls it before it looks up or captures a decode step's graph. Changes the dense layers whose
    number of slots depends on the prompt's length: keys, values, positions and scores are copied to larger tensors. A cache
    rounded before stays as it is.
    """
    layers = [layer for index, layer in enumerate(cache.layers) if _follows_prompt(cache, index)]
    if all(_is_rounded(layer) for layer in layers):
        return
    cache.unstack_layers(due=cache.stacked)  # layers' tensors may be views of one that stacks all layers
    # deviation_count: how many tokens RoCo protects, as an int, which a graph would keep as a constant. A step without it reads
    # the number from a tensor (`deviation`). Limits: numbers of protected tokens; layers that shared them share the new ones
    new_limits: dict[int, Limits] = {}
    for layer in layers:
        _widen(layer, round_capacity(layer.positions.shape[2]))
        old = layer.limits
        if old is not None:
            layer.limits = new_limits.setdefault(id(old), replace(old, deviation_count=None))
    # a captured step asserts that the text stays below this number of columns, up to which all layers have free slots
    columns_with_room = [layer.columns_read + layer.mode.writes_left for layer in cache.layers if layer.mode.has_short_heads]
    cache.counters.tensors.limit.fill_(min(columns_with_room, default=0))


def _follows_prompt(cache: EvictingCache, index: int) -> bool:
    """Tell if a layer's slots are to be rounded up for a graph: their number depends on the prompt's length, and can grow.

    `round_capacities` asks before a decode step is captured; index: of the layer in the cache. Left out: ragged layers, whose
    heads have different numbers of slots, which depend on the text itself, and layers whose `storage` is an engine's pages.
    """
    layer, rule = cache.layers[index], cache.settings.rules[index]
    if not isinstance(layer.kv, DenseSlots) or layer.storage is not None:
        return False
    if isinstance(layer.mode, Growing):  # nothing is evicted
        return True
    if not isinstance(layer.mode, Evicting) or layer.mode.has_short_heads:  # such a head may need more slots before it evicts
        return False
    # a budget of k tokens (not a share of the prompt), which counts prompt and answer alike
    constant = isinstance(rule, Size) and isinstance(rule.k, int) and cache.settings.policies[index].schedule != "decode"
    return not constant


def _is_rounded(layer: SlotLayer) -> bool:
    """Tell `round_capacities` if it has changed a layer before: its slots are a class's, and its limits have no constant."""
    C, limits = layer.positions.shape[2], layer.limits
    rounded = layer.may_have_empty and layer.columns_used == C == round_capacity(C)
    return rounded and (limits is None or limits.deviation_count is None)


def _widen(layer: SlotLayer, C: int) -> None:
    """Enlarge a layer in place to C slots a head, for `round_capacities`; attention masks the new, empty slots."""
    before = layer.positions.shape[2]
    layer.resize_slots([C])
    layer.columns_used, layer.may_have_empty = C, True  # all slots count as used, and those without a position as empty
    if isinstance(layer.mode, Growing):
        layer.mode.slack += C - before  # tokens that can still be written before buffers move
