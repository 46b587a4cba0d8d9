"""Header of a safetensors file, checked before memory is allocated for its tensors.

safetensors itself refuses tensors that overlap, leave gaps, or do not fit their shapes or the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """Dtype and shape of a tensor in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def read_entries(file: Any) -> dict[str, Entry]:
    """Return the dtype and shape of each tensor of an open safetensors file, by name, for `FileKind.read_file`."""
    return {name: _read_entry(name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118


def _read_entry(name: str, about: Any) -> Entry:
    """Return a tensor's dtype and shape from the header, for `read_entries`; raise InvalidError if kvpatch writes none like it.

    about: safetensors' slice of the tensor, which reads no numbers. A dtype outside DTYPES is refused, and a size of 0.
    """
    dtype, shape = about.get_dtype(), about.get_shape()
    if dtype not in DTYPES:
        raise InvalidError(f"tensor {name!r:.40} is of type {dtype}")
    if not are_counts(shape, least=1):
        raise InvalidError(f"tensor {name!r:.40} has shape {shape!r:.60}")
    return Entry(DTYPES[dtype], tuple(shape))


def read_tensor(file: Any, name: str) -> Tensor:
    """Return a copy of a tensor in an open file, for `FileKind.read_file`: safetensors' own would change if the file does."""
    tensor = file.get_tensor(name).clone()
    if tensor.dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
        raise InvalidError("a truth value is neither 0 nor 1")
    return tensor


def is_count(value: object, least: int = 0) -> bool:
    """Tell whether `value`, read from a file, is an int from `least` to 2**31 - 1, for fields that count (`Field.of_count`).

    The bound is above all counts of a cache: a head that keeps everything fills up in 2**30 steps (budgets.MAX_POSITION), and
    in some more if it waits to evict.
    """
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31


def are_counts(values: object, least: int = 0) -> bool:
    """Tell whether `values` is a list of ints from `least` to 2**31 - 1."""
    return isinstance(values, list) and all(is_count(value, least) for value in values)


def parse_json(text: str) -> Any:
    """Parse a file's description as strict JSON, for `FileKind.parse_description`.

    Raises InvalidError for duplicate names, NaN, infinity and deep nesting.
    """
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant, parse_float=_parse_float)
    except RecursionError:
        raise InvalidError("its description is nested too deep") from None
    except ValueError as error:
        raise InvalidError(f"its description is no JSON ({error!s:.80})") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of a JSON object, for `parse_json`; raise InvalidError if a name stands twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise InvalidError("a name stands twice in its description")
    return table


def _refuse_constant(text: str) -> float:
    """Raise InvalidError for `parse_json`, which comes here for NaN, Infinity and numbers too large for a float."""
    raise InvalidError(f"its description holds {text}")


def _parse_float(text: str) -> float:
    """Convert a number of a JSON text, for `parse_json`; raise InvalidError if it overflows, such as 1e999."""
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text[:20])
