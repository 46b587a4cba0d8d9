"""Writing of safetensors files with a checksum: whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import uuid
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from ..errors import KVPatchError


def write(path: str | PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str], what: str = "cache") -> None:
    """Write a file and rename it to its name once it is complete and on the disk; an earlier file stays until then.

    Raises:
        KVPatchError: `what` cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    goal = Path(path)
    part = goal.with_name(f".{goal.name}.{uuid.uuid4().hex}.part")
    try:
        if goal.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        try:
            save_file(tensors, part, metadata=metadata)
            _to_disk(part)
            os.replace(part, goal)
        finally:
            part.unlink(missing_ok=True)
        _to_disk(goal.parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise KVPatchError(
            f"The {what} was not saved to {path}: {reason}. Give the name of a file in a folder that exists, where you may "
            "write and there is room."
        ) from error


def _to_disk(path: Path) -> None:
    """Flush a file or folder to the disk, so that it survives a power failure."""
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(text: str, tensors: dict[str, Tensor]) -> str:
    """Return the checksum of a description and of names, types, shapes and numbers of tensors."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
