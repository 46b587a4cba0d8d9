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

        `change` reorders, repeats or drops batch rows (axis 0). Called when a cache is copied or its rows change, as in beam
        search; this object stays as it is.
        """
        new = copy.copy(self)
        new.change_rows(change)
        return new

    @classmethod
    def cat(cls: type[Owner], parts: Sequence[Owner]) -> Owner:
        """Join parts of several caches' state (of one class) into one with the rows of all. Other fields: those of parts[0]."""
        new = copy.copy(parts[0])
        for name, value in vars(parts[0]).items():
            if isinstance(value, Tensor):
                object.__setattr__(new, name, torch.cat([getattr(part, name) for part in parts]))
        return new

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of this object by `change(tensor)`, which acts along the first axis."""
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, change_tensors(value, change))  # a frozen dataclass changes in its copy alone


def change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of `value`, state of a cache whose rows change, with `change` applied to each tensor in it.

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
