"""Records of rollouts in a file, so that those of many need not stay in memory."""

from __future__ import annotations

from os import PathLike

import torch
from torch import Tensor

from ..cache.lifetimes import NEVER, Record
from ..errors import InvalidError, KVPatchError
from .header import Entry
from .kinds import RECORD, Description


def save_record(record: Record, path: str | PathLike[str]) -> None:
    """Write a record (when a run evicted which token) to a file, to free its memory until it is replayed.

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
    RECORD.write_file(path, RECORD.make_description(model=record.model, layers=len(record.deaths)), tensors)


def load_record(path: str | PathLike[str]) -> Record:
    """Read a record that `save_record` wrote, onto the CPU, for `replay`, which compares its model.

    Args:
        path: the file.

    Raises:
        KVPatchError: the file is missing, truncated or altered, or no record.

    Example:
        with kvpatch.replay(model, kvpatch.load_record("rollout.safetensors")):
            loss = model(texts, labels=texts).loss
    """
    with RECORD.reading(path):
        about, tensors, _ = RECORD.read_file(path, _check_tensor_names)
        deaths = tuple(tensors[f"{layer}.deaths"] for layer in range(about["layers"]))
        _check_numbers(tensors["ids"], deaths)
    return Record(tensors["ids"], deaths, about["model"])


def _check_tensor_names(about: Description, found: dict[str, Entry]) -> None:
    """Raise InvalidError unless a record's file has token ids, and each layer's tensor `deaths`.

    `FileKind.read_file` calls it for `load_record`, before tensors are read. A death is when a token was evicted. found: the
    header's entry of each tensor.
    """
    layers = about["layers"]
    if len(found) != layers + 1 or {*found} != {"ids", *(f"{layer}.deaths" for layer in range(layers))}:
        raise InvalidError(f"it holds {', '.join(sorted(found)):.80} where ids and the deaths of {layers} layers belong")


def _check_numbers(ids_NT: Tensor, deaths: tuple[Tensor, ...]) -> None:
    """Raise InvalidError, for `load_record`, for ids or deaths that no run can have.

    A text's ids are followed by -1 alone. A death is the position of the first query that no longer sees a token: it is later
    than the token and within the text, or NEVER.
    """
    known = ids_NT >= 0
    if bool((ids_NT < -1).any()) or bool((known[:, 1:] & ~known[:, :-1]).any()):
        raise InvalidError("its ids have a number below -1, or a token after their end")
    T = ids_NT.shape[1]
    for layer, deaths_NHT in enumerate(deaths):
        lives = (deaths_NHT == NEVER) | ((deaths_NHT > torch.arange(T, device="cpu")) & (deaths_NHT <= T))
        if not bool(lives.all()):
            raise InvalidError(f"in layer {layer} a token dies before its own query, or after the texts' end")
