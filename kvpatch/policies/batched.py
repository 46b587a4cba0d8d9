"""Objects whose tensors all have the batch as their first axis: their rows are reordered, repeated and dropped alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Owner = TypeVar("Owner", bound="Batched")


class Batched:
    """Base of such objects. Tensors may stand in tuples, lists and dictionaries, and in attributes that are Batched too.

    Example:
        @dataclass
        class Recent(Batched):
            q_BHGWD: Tensor
            positions_BW: Tensor

        recent.map_rows(lambda tensor: tensor.repeat_interleave(4, 0))
    """

    def map_rows(self: Owner, change: Callable[[Tensor], Tensor]) -> Owner:
        """Return a copy of this part of a cache's state, with every tensor replaced by `change(tensor)`.

        `change` reorders, repeats or drops batch rows (axis 0), as in beam search. `SlotLayer.map_rows` calls it for a layer's
        notes and limits (through `change_tensors`), LayerStack for limits. This object is not changed.
        """
        new = copy.copy(self)
        new.change_rows(change)
        return new

    @classmethod
    def cat(cls: type[Owner], parts: Sequence[Owner]) -> Owner:
        """Join objects of one class, from several caches, into a new one with the rows of all, as caches are concatenated.

        Fields that are no tensors are those of parts[0]. `EvictingCache.concatenate` calls it for the notes of layers (what a
        score remembers between passes).
        """
        new = copy.copy(parts[0])
        for name, value in vars(parts[0]).items():
            if isinstance(value, Tensor):
                object.__setattr__(new, name, torch.cat([getattr(part, name) for part in parts]))
        return new

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of this object by `change(tensor)`, which acts on batch rows; `map_rows` does so to a copy."""
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, change_tensors(value, change))  # a frozen dataclass changes in its copy alone


def change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of `value`, with `change` applied to each tensor in it, for `SlotLayer.map_rows` and `Slots.map_rows`.

    Lists, tuples, dictionaries and Batched objects are searched for tensors; `value` itself is not changed.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Batched):
        return value.map_rows(change)
    if isinstance(value, list | tuple):
        return type(value)(change_tensors(one, change) for one in value)
    if isinstance(value, dict):
        return {name: change_tensors(one, change) for name, one in value.items()}
    return value
