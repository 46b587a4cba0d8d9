"""Bytes of a model's weights: as its safetensors files say, or of a model without numbers that its configuration describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from .configuration import ITEMSIZES, Configuration

INDEX, FILE = "model.safetensors.index.json", "model.safetensors"


class Weights(NamedTuple):
    """Bytes of a model's weights, and where the number comes from; or None, and why the number is not known."""

    nbytes: int | None
    source: str


def read_weights(folder: Path) -> Weights | None:
    """Read the weights' bytes from the index or header of a folder's safetensors, for `find_weights`; None without."""
    try:
        if (folder / INDEX).is_file():
            return Weights(int(json.loads((folder / INDEX).read_text())["metadata"]["total_size"]), f"the index {INDEX}")
        if (folder / FILE).is_file():
            return Weights(_read_header(folder / FILE), f"the header of {FILE}")
    except (KeyError, TypeError, ValueError, OSError):
        return None
    return None


def _read_header(path: Path) -> int:
    """Add up the bytes of the tensors that a safetensors file's header lists, for `read_weights`."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(one["data_offsets"][1] - one["data_offsets"][0] for name, one in header.items() if name != "__metadata__")


def count_weights(config: Configuration, dtype: str) -> Weights:
    """Count the bytes of weights in `dtype`, for `plan`, if no file tells them: transformers builds the model on "meta"."""
    import torch
    import transformers as hf

    try:
        hf_config = hf.CONFIG_MAPPING[config.outer].from_json_file(config.path)
        auto = hf.AutoModelForCausalLM if type(hf_config) in hf.MODEL_FOR_CAUSAL_LM_MAPPING else hf.AutoModelForImageTextToText
        with torch.device("meta"):
            model = auto.from_config(hf_config, trust_remote_code=False)
    except Exception as error:  # of many classes: of values that do not fit, of types and packages that are not there
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        return Weights(None, f"transformers makes no model of this config.json ({reason}); name a folder with its safetensors")
    return Weights(sum(parameter.numel() for parameter in model.parameters()) * ITEMSIZES[dtype], "config.json")
