"""Records of rollouts in a file, so that those of many need not stay in memory: safetensors with a description in JSON.

The file is not trusted: its header is checked before memory is allocated for tensors, then their values. Its checksum detects
accidents and is no signature.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache.lifetimes import NEVER, Record
from ..errors import InvalidError, KVPatchError
from .file import checksum, readable, verify_checksum, write
from .header import Entry, entries, is_count, parse, read
from .schema import table

FORMAT = "kvpatch record 1"


def save_record(record: Record, path: str | PathLike[str]) -> None:
    """Write a record to a file, to free its memory until it is replayed.

    Args:
        record: what `Patch.record()` returned.
        path: the file; an earlier one of that name stays until the new one is whole.

    Raises:
        KVPatchError: `record` is none, or the file cannot be written.

    Example:
        kvpatch.save_record(patch.record(), "rollout.safetensors")
    """
    if not isinstance(record, Record):
        raise KVPatchError(f"save_record() takes a record, not {record!r:.60}: give what patch.record() returned.")
    tensors = {"ids": record.ids} | {f"{layer}.deaths": deaths for layer, deaths in enumerate(record.deaths)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"format": FORMAT, "model": record.model, "layers": len(record.deaths)})
    write(path, tensors, {"kvpatch": text, "checksum": checksum(text, tensors)}, "record")


def load_record(path: str | PathLike[str]) -> Record:
    """Read a record that `save_record` wrote, onto the CPU; a replay compares its model.

    Args:
        path: the file.

    Raises:
        KVPatchError: the file is missing, truncated or altered, or no record.

    Example:
        with kvpatch.replay(model, kvpatch.load_record("rollout.safetensors")):
            loss = model(texts, labels=texts).loss
    """
    from safetensors import safe_open

    if not isinstance(path, str | PathLike) or not str(path):
        raise KVPatchError(f"path={path!r} is no path: give the file that kvpatch.save_record() wrote.")
    again = "Record the rollout anew."
    with readable(path, "record", "`kvpatch.save_record()`", again), safe_open(Path(path), "pt") as file:
        texts = file.metadata() or {}
        about = _about(texts.get("kvpatch", ""))
        _check_shapes(about["layers"], entries(file))
        tensors = {name: read(file, name) for name in file.keys()}  # noqa: SIM118 - no dict
        verify_checksum(texts.get("checksum"), texts["kvpatch"], tensors)
        deaths = tuple(tensors[f"{layer}.deaths"] for layer in range(about["layers"]))
        _check_numbers(tensors["ids"], deaths)
    return Record(tensors["ids"], deaths, about["model"])


def _about(text: str) -> dict[str, Any]:
    about = parse(text) if text else {}
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InvalidError(f"it is not of this version of kvpatch ({FORMAT!r})")
    about = table("its description", about, ("format", "model", "layers"))
    if not isinstance(about["model"], dict) or not is_count(about["layers"], least=1):
        raise InvalidError("its description names no model, or no layers")
    return about


def _check_shapes(layers: int, found: dict[str, Entry]) -> None:
    """Raise InvalidError unless there are token ids [N,T], and deaths [N,H,T] of each layer."""
    if len(found) != layers + 1 or {*found} != {"ids", *(f"{layer}.deaths" for layer in range(layers))}:
        raise InvalidError(f"it holds {', '.join(sorted(found)):.80} where ids and the deaths of {layers} layers belong")
    ids = found["ids"]
    if ids.dtype != torch.int64 or len(ids.shape) != 2:
        raise InvalidError(f"ids is {ids.dtype} {list(ids.shape)} where int64 [N,T] belongs")
    for name, entry in found.items():
        shape = entry.shape
        if name != "ids" and (entry.dtype != torch.int32 or len(shape) != 3 or (shape[0], shape[2]) != ids.shape):
            raise InvalidError(f"{name} is {entry.dtype} {list(shape)} where int32 [{ids.shape[0]}, H, {ids.shape[1]}] belongs")


def _check_numbers(ids_NT: Tensor, deaths: tuple[Tensor, ...]) -> None:
    """Raise InvalidError unless texts are ids with nothing behind their end, and tokens die after their own query."""
    known = ids_NT >= 0
    if bool((ids_NT < -1).any()) or bool((known[:, 1:] & ~known[:, :-1]).any()):
        raise InvalidError("its ids are no texts with nothing behind their end")
    T = ids_NT.shape[1]
    for layer, deaths_NHT in enumerate(deaths):
        lives = (deaths_NHT == NEVER) | ((deaths_NHT > torch.arange(T)) & (deaths_NHT <= T))
        if not bool(lives.all()):
            raise InvalidError(f"in layer {layer} a token dies before its own query, or behind the texts' end")
