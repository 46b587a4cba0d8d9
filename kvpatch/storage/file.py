"""Files with a checksum: written whole or not at all, and what is said of one that cannot be read."""

from __future__ import annotations

import errno
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InvalidError, KVPatchError


def check_path(path: object, wanted: str) -> str | PathLike[str]:
    """Return a user's `path` if it can name a file, else raise KVPatchError, for `write_whole`, `FileKind.reading` and others.

    wanted: what the message tells the user to give. The file need not exist.
    """
    if not isinstance(path, str | PathLike) or not str(path) or "\0" in str(path):
        raise KVPatchError(f"path={path!r:.60} is no path: {wanted}.")
    return path


def write_whole(path: str | PathLike[str], save: Callable[[Path], object], what: str) -> None:
    """Let `save(part)` write a temporary file, and rename it to `path` once it is on the disk; an old file stays until then.

    `FileKind.write_file` and `FileKind.write_text` call it. what: names the file in the error, such as "cache".

    Raises:
        KVPatchError: the file cannot be written.
    """
    from safetensors import SafetensorError

    goal = Path(check_path(path, f"give the file that the {what} goes to"))
    try:
        if goal.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        part = goal.with_name(f".{goal.name}.{uuid.uuid4().hex}.part")
        try:
            save(part)
            _flush_to_disk(part)
            os.replace(part, goal)
        finally:
            part.unlink(missing_ok=True)
        _flush_to_disk(goal.parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise KVPatchError(
            f"The {what} was not saved to {path}: {reason}. Give the name of a file in a folder that exists, where you may "
            "write and there is room."
        ) from error


def _flush_to_disk(path: Path) -> None:
    """Flush a new file, or its folder, to the disk, for `write_whole`, so that it survives a power failure."""
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(text: str, tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of a file's description (`text`, JSON) and its tensors: names, dtypes, shapes and bytes.

    `FileKind.write_file` notes it in the file, and `verify_checksum` compares it when the file is read.
    """
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def explain_errors(path: str | PathLike[str], what: str, writer: str, again: str) -> Iterator[None]:
    """Turn errors raised inside the with-block, which reads a file, into a KVPatchError that says what to do.

    `FileKind.reading` calls it for every file that a user loads. Other errors pass.

    Args:
        path: the file.
        what: what the file should be, such as "saved cache".
        writer: the call or command that writes such files.
        again: a sentence that tells how to make the file anew.
    """
    from safetensors import SafetensorError

    try:
        yield
    except FileNotFoundError as error:
        raise KVPatchError(f"There is no file {path}: give one that {writer} wrote.") from error
    except OSError as error:
        raise KVPatchError(f"{path} cannot be read: {error.strerror or error}. Give a file that {writer} wrote.") from error
    except SafetensorError as error:
        raise KVPatchError(f"{path} cannot be read as a {what}: it is truncated or no such file ({error}). {again}") from error
    except InvalidError as error:
        raise KVPatchError(f"{path} is no valid {what}: {error}. {again}") from error


def verify_checksum(given: object, text: str, tensors: dict[str, Tensor]) -> None:
    """Raise InvalidError unless `given`, the checksum in a file, is that of its description and tensors."""
    if given != checksum(text, tensors):
        raise InvalidError("its checksum does not match, so it was altered")
