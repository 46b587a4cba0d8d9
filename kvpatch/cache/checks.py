"""Checks of arguments to a cache, before anything changes; each error says what to type instead."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import KVPatchError
from ..policies.budgets import as_python
from ..policies.context import at_hand

EMPTY = "The cache is empty, so that it has no rows yet: run a prompt through it first."


def check_layer(name: str, layer: object, count: int) -> None:
    """Raise KVPatchError unless `layer`, given to `get_seq_length` or `positions`, is an index of one of the `count` layers."""
    index = layer if type(layer) is int else read_whole(layer)
    if type(index) is not int or not -count <= index < count:
        raise KVPatchError(f"{name}={layer!r}: the cache has the layers 0 to {count - 1}, give one of these.")


def check_filled(is_filled: bool) -> None:
    """Raise KVPatchError if the cache is empty."""
    if not is_filled:
        raise KVPatchError(EMPTY)


# ---- rows of a batch ----


def check_beams(beam_idx: object, seen_B: Tensor | None) -> None:
    """Check the argument of reorder_cache(): one index per row, each within the batch. seen_B: None before the first prompt."""
    index = _check_index("beam_idx", beam_idx, (torch.int64, torch.int32))
    if seen_B is None:
        return
    B = len(seen_B)
    if len(index) != B:
        raise KVPatchError(
            f"beam_idx names {len(index)} rows, but the cache has {B}, and a reordered batch has as many: to drop or repeat "
            "rows use batch_select_indices() or batch_repeat_interleave()."
        )
    _check_range("beam_idx", index, 0, B)


def check_rows(indices: object, seen_B: Tensor | None, name: str = "indices", method: str = "batch_select_indices") -> Tensor:
    """Check the rows that a user of `select_rows` or `batch_select_indices` keeps; return indices, or a bool mask [B].

    seen_B: tokens of each row; None before the first prompt: then their number is not checked. name, method: for errors.
    """
    if isinstance(indices, list) and indices:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # else _check_index names what was given
            indices = torch.as_tensor(indices, device="cpu")
    index = _check_index(name, indices, (torch.int64, torch.int32, torch.bool))
    if seen_B is None:
        return index
    B = len(seen_B)
    if index.dtype == torch.bool and len(index) != B:
        raise KVPatchError(f"{name} is a mask of {len(index)} rows, but the cache has {B}: give an entry for each.")
    if not (index.any() if index.dtype == torch.bool else len(index)):
        raise KVPatchError(f"{method} would leave no row: let the cache go, or reset() it.")
    if index.dtype != torch.bool:
        _check_range(name, index, -B, B)
    return index


def _check_index(name: str, value: object, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return the 1-D tensor by which a user selects or reorders rows; raise KVPatchError unless it has one of these dtypes.

    `check_rows` and `check_beams` call it first. name: of the argument, for errors.
    """
    wanted = f"give an int64 tensor of row numbers{' or a bool mask' * (torch.bool in dtypes)}, such as torch.tensor([1, 0])."
    if not isinstance(value, Tensor):
        raise KVPatchError(f"{name}={value!r} is a {type(value).__name__}: {wanted}")
    if value.dtype not in dtypes:
        raise KVPatchError(f"{name} has dtype {value.dtype}: {wanted}")
    if value.ndim != 1:
        raise KVPatchError(f"{name} has shape {list(value.shape)}: {wanted}")
    check_real(name, value)  # not on the meta device
    return value


def _check_range(name: str, index: Tensor, low: int, B: int) -> None:
    """Raise KVPatchError if a row number that a user selects is below `low`, or not below B; numbers on a GPU are not read."""
    if not at_hand(index):
        return  # indexing the tensors with it checks this on the GPU, without a wait
    wrong = index[(index < low) | (index >= B)]
    if len(wrong):
        raise KVPatchError(f"{name} names row {int(wrong[0])}, but the cache has the rows 0 to {B - 1}: give some of these.")


# ---- tokens ----


def read_whole(value: Any) -> Any:
    """Return a whole number of any library (torch, numpy) as Python's int, and anything else as it is.

    `check_layer`, `count_removed` and `read_span` call it for an argument of a user, and refuse what is no int.
    """
    value = as_python(value)
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):  # of torch's meta device
        return value


def count_removed(tokens: object, seen: int) -> int:
    """Return how many last tokens crop(tokens) takes back: -tokens; for a positive number all but the first `tokens`.

    `editing.crop` and `LosslessCache.crop` call it. seen: columns read.
    """
    number = read_whole(tokens.flatten()[0] if isinstance(tokens, Tensor) and tokens.numel() == 1 else tokens)
    if type(number) is not int:
        raise KVPatchError(
            f"tokens_to_remove={tokens!r} must be a whole number: -3 takes back 3 tokens. To empty the cache use reset()."
        )
    count = -number if number <= 0 else max(seen - number, 0)
    if count > seen:
        raise KVPatchError(f"Cannot roll back {count} tokens: the cache has seen {seen}. Give at most so many, or reset() it.")
    return count


def check_real(name: str, tensor: Tensor) -> None:
    """Raise KVPatchError for a tensor on the meta device."""
    if tensor.device.type == "meta":
        raise KVPatchError(f"{name} lies on the meta device, which holds no numbers: give a tensor of a real device.")
