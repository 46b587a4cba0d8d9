"""Calibrations in a file, which names their model."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from torch import Tensor

from ..errors import InvalidError
from ..policies.measures import MEASURES, WHOLE, Calibration, list_statistics
from .header import Entry
from .kinds import CALIBRATION, Description

Layers = Mapping[int, Mapping[str, Tensor]]


def save_calibration(calibration: Calibration, path: str | PathLike[str]) -> None:
    """Write a calibration to the file `path`, as `kvpatch calibrate` and `kvpatch learn` do.

    Raises:
        KVPatchError: the file cannot be written.
    """
    CALIBRATION.write_file(path, *_describe_calibration(calibration.model, calibration.layers, calibration.tokens))


def make_calibration(model: Description, layers: Layers, tokens: int) -> Calibration:
    """Return a new Calibration for `kvpatch calibrate` and `kvpatch learn`; its digest is the checksum that its file will have.

    model: values that identify the model. layers: statistics by layer and name. tokens: how many were read.
    """
    return Calibration(model, layers, tokens, CALIBRATION.compute_checksum(*_describe_calibration(model, layers, tokens)))


def _describe_calibration(model: Mapping[str, object], layers: Layers, tokens: int) -> tuple[Description, dict[str, Tensor]]:
    """Return the description of a calibration's file, and its tensors by name ("LAYER.STATISTIC"), on the CPU."""
    found = {f"{layer}.{name}": tensor.cpu().contiguous() for layer, named in layers.items() for name, tensor in named.items()}
    return CALIBRATION.make_description(model=dict(model), tokens=tokens, layers=sorted(layers)), found


def load_calibration(path: str | PathLike[str]) -> Calibration:
    """Read a calibration that `kvpatch calibrate` or `kvpatch learn` wrote.

    Args:
        path: the file.

    Raises:
        KVPatchError: the file is missing, truncated or altered, or no calibration.

    Example:
        calibration = kvpatch.load_calibration("calibration.safetensors")
        with kvpatch.patched(model, "q_filter", k=0.5, calibration=calibration):
            model.generate(**inputs)
    """
    with CALIBRATION.reading(path):
        about, tensors, digest = CALIBRATION.read_file(path, _check_tensor_names)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise InvalidError("it holds a number that is not finite")
        layers = {
            layer: {name: tensors[f"{layer}.{name}"] for name in MEASURES if f"{layer}.{name}" in tensors}
            for layer in about["layers"]
        }
        for layer, statistics in layers.items():
            _check_pairs(layer, statistics)
    return Calibration(about["model"], layers, about["tokens"], digest)


def _check_tensor_names(about: Description, found: dict[str, Entry]) -> None:
    """Raise InvalidError, before tensors are read, unless each layer has one of the sets of statistics that belong together.

    `FileKind.read_file` calls it for `load_calibration`. A calibration is statistics measured on a model. Its tensors are named
    "LAYER.STATISTIC". about: the file's description. found: the header's entry (dtype and shape) of each tensor.
    """
    allowed = list(map(list_statistics, WHOLE))
    for layer in about["layers"]:
        held = [name for name in MEASURES if f"{layer}.{name}" in found]
        if held not in allowed:
            wanted = " or ".join(", ".join(names) for names in allowed)
            raise InvalidError(f"of layer {layer} it holds {', '.join(held) or 'nothing'} where {wanted} belong")
    unknown = set(found) - {f"{layer}.{name}" for layer in about["layers"] for name in MEASURES}
    if unknown:
        raise InvalidError(f"it holds {', '.join(sorted(unknown)):.80}, which are no statistics of its layers")


def _check_pairs(layer: int, statistics: dict[str, Tensor]) -> None:
    """Raise InvalidError, for `load_calibration`, if "pairs" (channels rotated together) name a channel that heads lack.

    statistics: of one layer by name; without "pairs" there is nothing to check. "direction" has the head size D.
    """
    if "pairs" not in statistics:
        return
    D = statistics["direction"].shape[-1]
    if not bool(((statistics["pairs"] >= 0) & (statistics["pairs"] < D)).all()):
        raise InvalidError(f"{layer}.pairs has a number that is no channel of {D}")
