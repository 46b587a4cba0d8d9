"""Calibrations in a file: safetensors with a description in JSON, and nothing that could run code.

The file is not trusted: its header is checked before memory is allocated for tensors, then their values. It names its model
and carries a checksum, which detects accidents and is no signature.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import InvalidError, KVPatchError
from ..policies.measures import MEASURES, WHOLE, Calibration, Measure, names
from .file import checksum, readable, verify_checksum, write
from .header import Entry, entries, is_count, parse, read
from .schema import table

FORMAT = "kvpatch calibration 1"

Layers = Mapping[int, Mapping[str, Tensor]]


def save_calibration(calibration: Calibration, path: str | PathLike[str]) -> None:
    """Write a calibration to the file `path`.

    Raises:
        KVPatchError: the file cannot be written.
    """
    text, tensors = _described(calibration.model, calibration.layers, calibration.tokens)
    write(path, tensors, {"kvpatch": text, "checksum": checksum(text, tensors)}, "calibration")


def made(model: dict[str, Any], layers: Layers, tokens: int) -> Calibration:
    """Return the calibration of these statistics by layer and name."""
    return Calibration(model, layers, tokens, checksum(*_described(model, layers, tokens)))


def _described(model: Any, layers: Layers, tokens: int) -> tuple[str, dict[str, Tensor]]:
    found = {f"{layer}.{name}": tensor for layer, own in layers.items() for name, tensor in own.items()}
    about = {"format": FORMAT, "model": dict(model), "tokens": tokens, "layers": sorted(layers)}
    return json.dumps(about), {name: tensor.cpu().contiguous() for name, tensor in found.items()}


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
        verify_checksum(texts.get("checksum"), texts["kvpatch"], tensors)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise InvalidError("it holds a number that is not finite")
        layers = {
            layer: {name: tensors[f"{layer}.{name}"] for name in MEASURES if f"{layer}.{name}" in tensors}
            for layer in about["layers"]
        }
        for layer, own in layers.items():
            _check_pairs(layer, own)
    return Calibration(about["model"], layers, about["tokens"], texts["checksum"])


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
    """Raise InvalidError unless the tensors are those that the description says: of each layer all of some kinds."""
    known = list(map(names, WHOLE))
    for layer in about["layers"]:
        own = [name for name in MEASURES if f"{layer}.{name}" in found]
        if own not in known:
            wanted = " or ".join(", ".join(one) for one in known)
            raise InvalidError(f"of layer {layer} it holds {', '.join(own) or 'nothing'} where {wanted} belong")
        sizes = dict[str, int]()
        for name in own:
            _check_shape(f"{layer}.{name}", MEASURES[name], found[f"{layer}.{name}"], sizes)
    more = set(found) - {f"{layer}.{name}" for layer in about["layers"] for name in MEASURES}
    if more:
        raise InvalidError(f"it holds {', '.join(sorted(more)):.80}, which are no statistics of its layers")


def _check_shape(name: str, measure: Measure, entry: Entry, sizes: dict[str, int]) -> None:
    """Raise InvalidError for another dtype or shape; `sizes` are those of the axes of the layer's statistics so far."""
    wanted = [axis if axis.isdigit() else str(sizes.get(axis, axis)) for axis in measure.shape]
    if len(entry.shape) == len(measure.shape):
        sizes |= {axis: size for axis, size in zip(wanted, entry.shape, strict=True) if not axis.isdigit()}
    right = [str(sizes.get(axis, axis)) for axis in wanted]
    if entry.dtype != measure.dtype or [str(size) for size in entry.shape] != right:
        raise InvalidError(f"{name} is {entry.dtype} {list(entry.shape)} where {measure.dtype} [{', '.join(wanted)}] belongs")


def _check_pairs(layer: int, own: dict[str, Tensor]) -> None:
    """Raise InvalidError for pairs that are no channels."""
    if "pairs" not in own:
        return
    D = own["direction"].shape[-1]
    if not bool(((own["pairs"] >= 0) & (own["pairs"] < D)).all()):
        raise InvalidError(f"{layer}.pairs has a number that is no channel of {D}")
