"""What is done to a saved cache: files are taken apart and put together here byte by byte, so that they can be wrong in ways
that no library would write. Used by test_fuzz.py and by `python -m tools.reliability.fuzz`."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvpatch.storage.kinds import CACHE

FORMAT = CACHE.format

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "BOOL": torch.bool, "U8": torch.uint8}  # fmt: skip
NASTY: list[Any] = [0, -1, 1, 2, 7, 255, 2**15, 2**31, 2**62, 2**63, -(2**63), 10**30, 0.5, 1e308, True, False, None,
                    "", "x", [], {}, [0], [[0]], {"a": 1}]  # fmt: skip


# ---- a file in parts ----


@dataclass
class Parts:
    """about: the description; tensors: dtype, shape and bytes by name."""

    about: Any
    tensors: dict[str, tuple[str, list[int], bytes]]

    @classmethod
    def of(cls, file: bytes) -> Parts:
        length = int.from_bytes(file[:8], "little")
        header = json.loads(file[8 : 8 + length])
        about, data = json.loads(header.pop("__metadata__")["kvpatch"]), file[8 + length :]
        tensors = {
            name: (one["dtype"], one["shape"], data[slice(*one["data_offsets"])])
            for name, one in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"])
        }
        return cls(about, tensors)

    def file(self, text: str | None = None, change: Callable[[dict[str, Any]], None] | None = None) -> bytes:
        """With a checksum that fits. text: in place of the description; change: of the header."""
        text = json.dumps(self.about) if text is None else text
        header: dict[str, Any] = {"__metadata__": {"kvpatch": text, "checksum": self.checksum(text)}}
        at = 0
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        if change is not None:
            change(header)
        packed = json.dumps(header).encode()
        return len(packed).to_bytes(8, "little") + packed + b"".join(data for _, _, data in self.tensors.values())

    def checksum(self, text: str) -> str:
        digest = hashlib.sha256(text.encode())
        for name in sorted(self.tensors):
            dtype, shape, data = self.tensors[name]
            digest.update(f"{name} {DTYPES.get(dtype)} {shape}".encode())
            digest.update(data)
        return digest.hexdigest()


# ---- what is done to it ----


def flip(file: bytes, r: random.Random) -> bytes:
    """Bytes changed anywhere."""
    changed = bytearray(file)
    for _ in range(r.randint(1, 8)):
        changed[r.randrange(min(len(file), r.choice([16, 2000, len(file)])))] = r.randrange(256)
    return bytes(changed)


def cut(file: bytes, r: random.Random) -> bytes:
    """Truncated, or longer than it says."""
    return file[: r.randrange(len(file))] if r.random() < 0.7 else file + r.randbytes(r.randint(1, 64))


def described(file: bytes, r: random.Random) -> bytes:
    """Values of the description replaced by nasty ones, of any type."""
    parts = Parts.of(file)
    for _ in range(r.randint(1, 3)):
        _at(parts.about, r, lambda holder, key: holder.__setitem__(key, copy.deepcopy(r.choice(NASTY))))
    return parts.file()


def counted(file: bytes, r: random.Random) -> bytes:
    """Counters, flags and sizes moved a little."""
    parts = Parts.of(file)

    def move(holder: Any, key: Any) -> None:
        value = holder[key]
        moved = value + r.choice([-7, -1, 1, 7]) if isinstance(value, int) else 3
        holder[key] = (not value) if isinstance(value, bool) else moved

    for _ in range(r.randint(1, 3)):
        _at({name: parts.about[name] for name in ("cache", "layers")}, r, move)
    return parts.file()


def _at(tree: Any, r: random.Random, change: Callable[[Any, Any], None]) -> None:
    """`change` a random place of a tree of tables and lists."""
    while True:
        key = r.choice(list(tree)) if isinstance(tree, dict) else r.randrange(len(tree))
        if not isinstance(tree[key], dict | list) or not tree[key] or r.random() < 0.1:
            change(tree, key)
            return
        tree = tree[key]


def numbered(file: bytes, r: random.Random) -> bytes:
    """Numbers of one tensor changed."""
    parts = Parts.of(file)
    small = [name for name in parts.tensors if "keys" not in name and "values" not in name]
    name = r.choice(small if r.random() < 0.7 else list(parts.tensors))
    dtype, shape, data = parts.tensors[name]
    tensor = torch.frombuffer(bytearray(data), dtype=DTYPES[dtype])
    for _ in range(r.randint(1, 4)):
        at = r.randrange(len(tensor))
        if dtype == "I64":
            tensor[at] = r.choice([-1, -2, 0, 1, 5, 23, 24, 26, 27, 2**31, 2**62, int(tensor[at]) + r.choice([-1, 1])])
        elif dtype == "BOOL":
            data = bytes(data[:at]) + bytes([r.choice([0, 1, 2, 255])]) + bytes(data[at + 1 :])
            parts.tensors[name] = (dtype, shape, data)
            return parts.file()
        else:
            tensor[at] = r.choice([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e30, -1e-30])
    parts.tensors[name] = (dtype, shape, tensor.view(torch.uint8).numpy().tobytes())
    return parts.file()


def shaped(file: bytes, r: random.Random) -> bytes:
    """Tensors renamed, swapped, dropped, repeated, reshaped, cast or cut."""
    parts = Parts.of(file)
    name, other = r.choice(list(parts.tensors)), r.choice(list(parts.tensors))
    dtype, shape, data = parts.tensors[name]
    tensor = torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).view(shape)
    way = r.randrange(7)
    if way == 0:
        parts.tensors[name], parts.tensors[other] = parts.tensors[other], parts.tensors[name]
    elif way == 1:
        del parts.tensors[name]
    elif way == 2:
        name = r.choice(["", "0.extra", "9.keys", "0.state.sum", "-1.keys", "0.free_BH", "shared", "shortfall_B", "span_B"])
        parts.tensors[name] = (dtype, shape, data)
    elif way == 3:
        parts.tensors[name] = (dtype, r.choice([shape[::-1], [*shape, 1], [math.prod(shape)], shape[1:]]), data)
    elif way == 4:
        kind = r.choice(list(DTYPES))
        parts.tensors[name] = (kind, shape, tensor.to(DTYPES[kind]).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        dim = r.randrange(len(shape))
        index = torch.arange(max(shape[dim] + r.choice([-1, 1]), 1)).clamp(max=shape[dim] - 1)
        tensor = tensor.index_select(dim, index).contiguous()
        parts.tensors[name] = (dtype, list(tensor.shape), tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return parts.file()


def headed(file: bytes, r: random.Random) -> bytes:
    """A header that is no header, or whose tensors overlap, are empty or are of no known type."""
    parts = Parts.of(file)
    names = list(parts.tensors)

    def change(header: dict[str, Any]) -> None:
        one = header[r.choice(names)]
        field = r.choice(["dtype", "shape", "data_offsets"])
        if field == "data_offsets":
            other = header[r.choice(names)][field]
            one[field] = r.choice([other, [0, 0], one[field][::-1], [0, 2**62], [-8, 0], one[field][:1], 3])
        elif field == "shape":
            one[field] = r.choice([[0], [], [-1, -1], [2**40, 2**40], [True], "x", [1.5], [*one[field], 0], [1] * 70])
        else:
            one[field] = r.choice(["F8_E4M3", "U8", "I32", 7, None, "f32", ["F32"]])

    whole = json.dumps(parts.about)
    text = r.choice([
        None, f'{{"format": "{FORMAT}", "format": "{FORMAT}"}}', "[" * 100_000, '{"a":' * 50_000, "{}", "[]", "7",
        "", '{"format": NaN}', '{"format": 1e999}', "\ud800", whole[:-1], whole[:-1] + ', "layers": []}',
    ])  # fmt: skip
    try:
        made = parts.file(text, change if r.random() < 0.7 or text is None else None)
    except UnicodeEncodeError:
        made = file.replace(FORMAT.encode(), b"kvpatch cache \xff")
    if r.random() < 0.2:
        made = r.choice([0, 1, 7, 2**20, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little") + made[8:]
    return made


KINDS = {one.__name__: one for one in (flip, cut, described, counted, numbered, shaped, headed)}
