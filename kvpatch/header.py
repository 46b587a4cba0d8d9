"""The header of a safetensors file, read alone: what the file says it holds, checked before memory is taken for any of it.

A header is 8 bytes with its length, then JSON: for each tensor its type, shape and place, and a table of texts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

LONGEST = 1 << 25  # bytes of a header: thousands of rows and heads need a few millions
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


class InvalidError(Exception):
    """What is wrong with a file, in words; storage.py names the file."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: bytes `begin` to `end` behind the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self, file: BinaryIO, start: int) -> Tensor:
        buffer = bytearray(self.end - self.begin)
        file.seek(start + self.begin)
        if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            raise InvalidError("it ends before its last tensor")
        if self.dtype == torch.bool and buffer.strip(b"\0\1"):
            raise InvalidError("a truth value is neither 0 nor 1")
        return torch.frombuffer(buffer, dtype=self.dtype).view(self.shape)


def read_header(file: BinaryIO, size: int) -> tuple[dict[str, Entry], dict[str, str], int]:
    """Tensors by name, texts by name, and where the tensors begin, of a file of `size` bytes."""
    if size < 8:
        raise InvalidError("it is shorter than the length of its header")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, LONGEST):
        raise InvalidError(f"its header would have {length} bytes")
    header = parse(file.read(length))
    if not isinstance(header, dict):
        raise InvalidError("its header is no table")
    texts = header.pop("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise InvalidError("its texts are no table of texts")
    entries = {name: _entry(name, about) for name, about in header.items()}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].begin):
        if entry.begin != at:
            raise InvalidError(f"tensor {name!r:.40} does not begin where the one before it ends")
        at = entry.end
    if 8 + length + at != size:
        raise InvalidError(f"its tensors need {at} bytes and it has {size - 8 - length}")
    return entries, texts, 8 + length


def _entry(name: str, about: object) -> Entry:
    where = f"tensor {name!r:.40}"
    if not isinstance(about, dict) or set(about) != {"dtype", "shape", "data_offsets"}:
        raise InvalidError(f"{where} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidError(f"{where} is of type {dtype!r:.40}")
    if not are_counts(shape, least=1) or len(shape) > 4:
        raise InvalidError(f"{where} has shape {shape!r:.60}")
    if not are_counts(offsets, most=1 << 62) or len(offsets) != 2:
        raise InvalidError(f"{where} lies at {offsets!r:.60}")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype].itemsize:
        raise InvalidError(f"{where} of shape {shape!r:.60} does not fit into its {offsets[1] - offsets[0]} bytes")
    return Entry(DTYPES[dtype], tuple(shape), offsets[0], offsets[1])


def is_count(value: object, least: int = 0, most: int = (1 << 30) - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def are_counts(values: object, least: int = 0, most: int = (1 << 30) - 1) -> bool:
    return isinstance(values, list) and all(is_count(value, least, most) for value in values)


def parse(data: bytes) -> Any:
    """Strict JSON: each name once, no number that is none, and no deeper than Python reads."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise InvalidError("its description is nested too deep") from None
    except ValueError as error:
        raise InvalidError(f"its description is no JSON ({error!s:.80})") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise InvalidError("a name stands twice in its description")
    return table


def _no_number(text: str) -> float:
    raise InvalidError(f"its description holds {text}")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text[:20])
