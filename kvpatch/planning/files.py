"""A model's configuration and the bytes of its weights, from a folder or the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import KVPatchError
from .configuration import Configuration
from .weights import INDEX, Weights, read_weights

CONFIG = "config.json"


def find_configuration(name: str, revision: str | None = None) -> Configuration:
    """Read the config.json of a folder, or of a model on the hub, for `plan`; raise KVPatchError if there is none.

    revision: branch, tag or commit on the hub; None is its main branch.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise KVPatchError(f"The folder {name} has no config.json: name the folder that save_pretrained() wrote.")
        return Configuration.read(folder / CONFIG, name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise KVPatchError(f"There is no folder {name}: name a folder with a config.json, or a model on the hub.")
    return Configuration.read(_download_file(name, CONFIG, revision), name)


def find_weights(name: str, revision: str | None = None) -> Weights | None:
    """Find how many bytes a model's weights have, for `plan`, by a safetensors index or header, in a folder or on the hub.

    None if neither is there. Of a model on the hub only these are read, not the weights.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return read_weights(folder)
    try:
        return read_weights(_download_file(name, INDEX, revision).parent)
    except KVPatchError:
        return _ask_hub(name, revision)


def _ask_hub(name: str, revision: str | None) -> Weights | None:
    """Read the weights' bytes from the headers of files on the hub, for `find_weights` without an index; None if that fails."""
    try:
        from huggingface_hub import get_safetensors_metadata

        files: Any = get_safetensors_metadata(name, revision=revision).files_metadata
        offsets = [tensor.data_offsets for file in files.values() for tensor in file.tensors.values()]
    except Exception:  # no such file, no network, a token that is missing: the weights are counted instead
        return None
    return Weights(sum(end - begin for begin, end in offsets), "the header of the hub's safetensors")


def _download_file(name: str, file: str, revision: str | None) -> Path:
    """Return the path of a model's small file, downloaded or in huggingface_hub's cache; raise KVPatchError without one."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise KVPatchError(f"{name} is no folder; for a name on the hub type pip install huggingface_hub.") from None
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except Exception as error:  # of many classes, of huggingface_hub and of what it uses
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise KVPatchError(f"{file} of {name} cannot be had: {reason} Name a folder, or check the name on the hub.") from None
