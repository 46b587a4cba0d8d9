"""Calibrations in a file: safetensors with a description in JSON, and nothing that could run code.

The file is not trusted: its header is checked before memory is allocated for tensors, then their values. It names its model
and carries a checksum, which detects accidents and is no signature.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidError, KVPatchError
from ..policies.calibration import Calibration
from .file import check_sum, checksum, readable, write
from .header import Entry, entries, is_count, parse, read
from .schema import table

FORMAT = "kvpatch calibration 1"


def save_calibration(calibration: Calibration, path: str | PathLike[str]) -> None:
    """Write a calibration to the file `path`.

    Raises:
        KVPatchError: the file cannot be written.
    """
    text, tensors = _described(calibration.model, calibration.directions, calibration.tokens)
    write(path, tensors, {"kvpatch": text, "checksum": checksum(text, tensors)}, "calibration")


def made(model: dict[str, Any], directions: dict[int, Tensor], tokens: int) -> Calibration:
    """Return the calibration of these measurements."""
    return Calibration(model, directions, tokens, checksum(*_described(model, directions, tokens)))


def _described(model: Any, directions: Any, tokens: int) -> tuple[str, dict[str, Tensor]]:
    tensors = {f"{layer}.direction": tensor.float().cpu().contiguous() for layer, tensor in directions.items()}
    about = {"format": FORMAT, "model": dict(model), "tokens": tokens, "layers": sorted(directions)}
    return json.dumps(about), tensors


def load_calibration(path: str | PathLike[str]) -> Calibration:
    """Read a calibration that `kvpatch calibrate` wrote.

    Args:
        path: the file.

    Raises:
        KVPatchError: the file is missing, truncated or altered, or no calibration.

    Example:
        calibration = kvpatch.load_calibration("calibration.safetensors")
        with kvpatch.patched(model, "q_filter", k=0.5, calibration=calibration):
            model.generate(**inputs)
    """
    from safetensors import safe_open

    if not isinstance(path, str | PathLike) or not str(path):
        raise KVPatchError(f"path={path!r} is no path: give the file that `kvpatch calibrate` wrote.")
    again = "Make it anew with `kvpatch calibrate`."
    with readable(path, "calibration", "`kvpatch calibrate`", again), safe_open(Path(path), "pt") as file:
        texts = file.metadata() or {}
        about = _about(texts.get("kvpatch", ""))
        found = entries(file)
        _check(about, found)
        tensors = {name: read(file, name) for name in found}
        check_sum(texts, tensors)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise InvalidError("it holds a number that is not finite")
    directions = {layer: tensors[f"{layer}.direction"] for layer in about["layers"]}
    return Calibration(about["model"], directions, about["tokens"], texts["checksum"])


def _about(text: str) -> dict[str, Any]:
    about = parse(text) if text else {}
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InvalidError(f"it is not of this version of kvpatch ({FORMAT!r})")
    about = table("its description", about, ("format", "model", "tokens", "layers"))
    layers = about["layers"]
    if not isinstance(about["model"], dict) or not is_count(about["tokens"], least=1):
        raise InvalidError("its description names no model, or no tokens")
    if not isinstance(layers, list) or not layers or not all(map(is_count, layers)) or len(set(layers)) < len(layers):
        raise InvalidError(f"its layers are {layers!r:.60}")
    return about


def _check(about: dict[str, Any], found: dict[str, Entry]) -> None:
    """Raise InvalidError unless the tensors are those that the description says."""
    if set(found) != {f"{layer}.direction" for layer in about["layers"]}:
        raise InvalidError(f"it holds {', '.join(sorted(found)):.80}, which are not the directions of its layers")
    for name, entry in found.items():
        if entry.dtype != torch.float32 or len(entry.shape) != 2:
            raise InvalidError(f"{name} is {entry.dtype} {list(entry.shape)} where torch.float32 [heads, head size] belongs")
