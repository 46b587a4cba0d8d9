"""Saved caches, what is done to them, and what must come of it: an error of ours, or a cache that decodes and is sound.

Used by test_fuzz.py and by `python -m tools.reliability.fuzz`. Files are taken apart and put together here byte by byte, so
that they can be wrong in ways that no library would write.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny import force, left_pad, make, prompt

import kvpatch
from kvpatch import EvictingCache, KVPatchError
from kvpatch.policies import adaptive, critical, pyramid

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "BOOL": torch.bool}  # fmt: skip
NASTY: list[Any] = [0, -1, 1, 2, 7, 255, 2**15, 2**31, 2**62, 2**63, -(2**63), 10**30, 0.5, 1e308, True, False, None,
                    "", "x", [], {}, [0], [[0]], {"a": 1}]  # fmt: skip


@dataclass
class Seed:
    """A valid file, the patch that loads it, and the model."""

    name: str
    patch: Any
    model: Any
    file: bytes
    rows: int


def _plain(model: Any, patch: Any) -> EvictingCache:
    return force(model, prompt(2, 24), prompt(2, 3, seed=2))[1]


def _padded(model: Any, patch: Any) -> EvictingCache:
    ids = prompt(2, 24)
    return force(model, ids, prompt(2, 3, seed=2), left_pad(ids, [24, 15]))[1]


def _roomy(model: Any, patch: Any) -> EvictingCache:
    return force(model, prompt(2, 24), prompt(2, 3, seed=2), cache=patch.new_cache(room=12))[1]


def _joined(model: Any, patch: Any) -> EvictingCache:
    parts = [force(model, prompt(1, n), prompt(1, m, seed=n))[1] for n, m in ((24, 2), (17, 5))]
    return EvictingCache.concatenate(parts)


def _two_turns(model: Any, patch: Any) -> EvictingCache:
    _, cache = force(model, prompt(2, 20), prompt(2, 4, seed=2))
    return force(model, prompt(2, 9, seed=3), prompt(2, 2, seed=4), cache=cache)[1]


def _rows(model: Any, patch: Any) -> EvictingCache:
    cache = _padded(model, patch)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 2]))
    return cache


def _cropped(model: Any, patch: Any) -> EvictingCache:
    cache = patch.new_cache()
    cache.activate_past_recording()
    _, cache = force(model, prompt(2, 24), prompt(2, 6, seed=2), cache=cache)
    cache.crop(-4)
    return cache


_ragged = critical(adaptive("roco"))
STATES: dict[str, tuple[str, Any, dict[str, Any], Callable[[Any, Any], EvictingCache]]] = {
    "h2o": ("llama_gqa", "h2o", {}, _plain),
    "roco, padded": ("llama_gqa", "roco", {"recent": 2}, _padded),
    "h2o, rows selected": ("llama_gqa", "h2o", {}, _rows),
    "keyformer": ("llama_gqa", "keyformer", {}, _joined),
    "keyformer, shared": ("llama_gqa", "keyformer", {"shared": True}, _plain),
    "snapkv": ("llama_gqa", "snapkv", {"window": 4}, _plain),
    "snapkv, two turns": ("llama_gqa", "snapkv", {"window": 4, "turns": "each"}, _two_turns),
    "adakv": ("llama_gqa", "adakv", {"window": 4}, _padded),
    "ragged, evicting": ("llama_gqa", _ragged, {"recent": 2, "protected": 0.2}, _plain),
    "pyramid": ("llama_gqa", pyramid("tova"), {}, _plain),
    "full": ("llama_gqa", "full", {}, _padded),
    "full, with room": ("llama_gqa", "full", {}, _roomy),
    "filling": ("llama_gqa", "window", {"k": 40}, _plain),
    "filling, joined": ("llama_gqa", "h2o", {"k": 26}, _joined),
    "decode alone": ("llama_gqa", "h2o", {"k": 3, "schedule": "decode"}, _plain),
    "rolled back": ("llama_gqa", "h2o", {}, _cropped),
    "key_norm, renumbered": ("llama_gqa", "key_norm", {"positions": "renumbered"}, _two_turns),
    "sliding": ("mistral_sliding", "h2o", {}, _plain),
    "gpt2": ("gpt2", "streaming_llm", {}, _plain),
    "mpt": ("mpt", "scissorhands", {}, _padded),
}


def seed(name: str, folder: Path) -> Seed:
    kind, policy, options, fill = STATES[name]
    model = make(kind)
    patch = kvpatch.patch(model, policy, **{"k": 0.4, **options})
    cache = fill(model, patch)
    patch.save_cache(cache, folder / "seed")
    assert cache.seen_B is not None
    return Seed(name, patch, model, (folder / "seed").read_bytes(), len(cache.seen_B))


def attempt(one: Seed, path: Path) -> str | None:
    """Load and decode three tokens: the words of the refusal, or None. Anything but our own error comes through."""
    try:
        cache = one.patch.load_cache(path)
    except KVPatchError as error:
        return str(error)
    try:
        with torch.no_grad():
            B = len(cache.seen_B)
            for t in range(3):
                one.model(prompt(B, 1, seed=t), past_key_values=cache)  # of keys of 1e30 no logits are finite
                assert sound(cache), "the cache is no longer sound"
    except KVPatchError as error:
        return f"while decoding: {error}"
    return None


def sound(cache: EvictingCache) -> bool:
    """Invariant 3 of the house: budgets hold, positions are unique and real."""
    seen_B = cache.seen_B
    assert seen_B is not None
    for index, layer in enumerate(cache.layers):
        positions = cache.positions(index)
        for b, row in enumerate(positions.tolist()):
            for h, head in enumerate(row):
                held = [p for p in head if p >= 0]
                if len(set(held)) < len(held) or not held or max(held) >= int(seen_B[b]):
                    return False
                if layer.evicting and len(held) > int(layer.keep_BH1[b, h, 0]):  # type: ignore[index]
                    return False
        if layer.evicting and cache.policy.over_heads is None:
            n = int(seen_B.max())
            allowed = cache.tokens(index, n) * 2 + (n if cache.policy.schedule == "decode" else 0)
            if int(cache.held(index).max()) > allowed:
                return False
    return True


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
        name = r.choice(["", "0.extra", "9.keys", "0.state.sum", "-1.keys", "0.free_BH", "shared", "lag_B"])
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
        None, '{"format": "kvpatch cache 1", "format": "kvpatch cache 1"}', "[" * 100_000, '{"a":' * 50_000, "{}", "[]", "7",
        "", '{"format": NaN}', '{"format": 1e999}', "\ud800", whole[:-1], whole[:-1] + ', "layers": []}',
    ])  # fmt: skip
    try:
        made = parts.file(text, change if r.random() < 0.7 or text is None else None)
    except UnicodeEncodeError:
        made = file.replace(b"kvpatch cache 1", b"kvpatch cache \xff")
    if r.random() < 0.2:
        made = r.choice([0, 1, 7, 2**20, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little") + made[8:]
    return made


KINDS = {one.__name__: one for one in (flip, cut, described, counted, numbered, shaped, headed)}
