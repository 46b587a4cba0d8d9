"""Decoders of which not every layer is on the budget.

In a hybrid, layers with a state of fixed size are transformers' own. In others, layers without keys use an earlier layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig

from ..arch.adapter import source_module
from ..arch.interface import ATTENTION
from ..arch.kinds import knows_number, source_of
from ..arch.upstream import HYBRIDS, DynamicLayer, LinearAttentionLayer, keeps_state
from ..cache.recurrent import Stack
from ..errors import KVPatchError


def stack_of(decoder: Any) -> Stack | None:
    """Return the Stack of a hybrid decoder: numbers of its layers that attend, and of those with a recurrent state; or None.

    `Target.find` calls it before a model is patched. Read from the empty cache that transformers makes for its configuration.

    Raises:
        KVPatchError: the model brings a cache class of its own, or this transformers is too old for its states.
    """
    config = getattr(decoder, "config", None)
    types = getattr(config, "layer_types", None)
    if not isinstance(config, PreTrainedConfig) or not types or set(types) <= ATTENTION:
        return None
    _refuse_own_cache(decoder)
    layers = enumerate(DynamicCache(config=config).layers)
    kept = [(number, layer) for number, layer in layers if isinstance(layer, DynamicLayer | LinearAttentionLayer)]
    states = tuple((number, layer.number_of_states) for number, layer in kept if isinstance(layer, LinearAttentionLayer))
    if states and not HYBRIDS:
        raise KVPatchError(
            f"{type(decoder).__name__} has layers with a recurrent state, which this transformers keeps where kvpatch cannot "
            "stand in: install a newer one, pip install -U 'transformers<6'."
        )
    attention = tuple(number for number, layer in kept if isinstance(layer, DynamicLayer))
    return Stack(attention, states, croppable=not keeps_state(type(decoder)))  # croppable: states of convolutions alone


def with_readers(stack: Stack | None, numbers: dict[nn.Module, int]) -> Stack | None:
    """Return a Stack (table of layer numbers) with `readers`: layers that have no keys and use those of another layer.

    `Target.find` calls it before a model is patched. stack: which layers of a hybrid attend or keep a state, or None; returned
    as it is if every layer has keys. numbers: layer number of each attention module.
    """
    sources = {module: source_of(module, list(numbers)) for module in numbers}
    readers = {numbers[module]: numbers[source] for module, source in sources.items() if source is not None}
    if not readers:
        return stack
    attention = sorted(numbers.values()) if stack is None else stack.attention
    with_keys = tuple(number for number in attention if number not in readers)
    return replace(stack or Stack((), ()), attention=with_keys, readers=tuple(sorted(readers.items())))


def layer_numbers(decoder: nn.Module, attentions: Sequence[nn.Module]) -> dict[nn.Module, int]:
    """Return each attention module's layer number, which orders cache layers: `layer_idx`, or the place in the module list.

    `Target.find` calls it before a model is patched. attentions: modules of the decoder.
    """
    names, numbers = {module: name for name, module in decoder.named_modules()}, dict[nn.Module, int]()
    for attn in attentions:
        place = next(filter(str.isdigit, names[attn].split(".")), "0")
        numbers[attn] = int(attn.layer_idx if knows_number(attn) else place)  # type: ignore[arg-type]
    return numbers


def find_state_modules(decoder: nn.Module, stack: Stack, attentions: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """Return, by layer number, the module that keeps the recurrent state of each such layer of a hybrid.

    `Target.state_devices` calls it, and `Target.list_mixers` for `kvpatch check`. stack: which layers have a state. attentions:
    modules that are left out, since they keep keys. Of nested modules with one `layer_idx` the innermost is returned.
    """
    numbers, found = dict(stack.states), dict[int, nn.Module]()
    for module in decoder.modules():
        number = getattr(module, "layer_idx", None)
        if number in numbers and module not in attentions:
            found[number] = module
    return found


def _refuse_own_cache(decoder: nn.Module) -> None:
    """Raise KVPatchError, for `stack_of`, for a hybrid whose Python module defines a cache: ours lacks its methods."""
    home = source_module(decoder)
    defined = [kind.__name__ for kind in vars(home).values() if isinstance(kind, type) and kind.__module__ == home.__name__]
    caches = [name for name in defined if issubclass(getattr(home, name), Cache)]
    if caches:
        raise KVPatchError(
            f"{type(decoder).__name__} keeps the state of its linear layers in a cache of its own, {caches[0]}, and takes "
            "no other: kvpatch serves hybrids whose states are in transformers' own cache layers."
        )
