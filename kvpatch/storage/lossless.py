"""Saved lossless caches: the entries of all tokens. A file is of no policy and no budget: each pass chooses what is held."""

from __future__ import annotations

from os import PathLike

import torch
from torch import Tensor

from ..cache.lossless import LosslessCache
from ..cache.tensors import FLOATS
from ..errors import InvalidError, KVPatchError
from .header import Entry
from .kinds import LOSSLESS, Description
from .save_load import compare_tables
from .schema import LayerShape

ROWS = "rows"  # of a layer: keys and values of a token side by side


def save_lossless(cache: LosslessCache, path: str | PathLike[str], model: Description) -> None:
    """Write a cache of `lossless=True`, the keys and values of all tokens, to a file, for `save_cache`.

    model: values that identify the model.

    Raises:
        KVPatchError: the cache is empty, or the file cannot be written.
    """
    if not cache.kept_positions:
        raise KVPatchError("The cache is empty: there is nothing to save. Run a prompt through it first.")
    tensors = {"ids": torch.tensor(cache.ids, device="cpu"), "places": torch.tensor(cache.kept_positions, device="cpu")}
    for index, layer in enumerate(cache.layers):  # the layers on the host, with the entries of all tokens
        layer.store.wait()  # for copies from the device
        tensors[f"{index}.{ROWS}"] = layer.store.rows_NE[: len(cache.kept_positions)]
    LOSSLESS.write_file(path, LOSSLESS.make_description(model=model, edited=cache.edited), tensors)
    for layer in cache.layers:
        layer.store.release()  # drops a mapped file's pages from memory


def load_lossless(
    cache: LosslessCache,
    path: str | PathLike[str],
    model: Description,
    shapes: list[LayerShape],
    devices: list[torch.device],
) -> LosslessCache:
    """Read a file into the empty `cache`, for `load_cache`, and return the cache.

    model: values that identify the model. shapes, devices: of each layer of the model.

    Raises:
        KVPatchError: the file is missing, truncated or altered, or of another model.
    """

    def check_header(about: Description, found: dict[str, Entry]) -> None:
        compare_tables("model", about["model"], model, path)  # raises if they differ
        _check_rows(found, shapes)

    with LOSSLESS.reading(path):
        about, tensors, _ = LOSSLESS.read_file(path, check_header)
        rows = [tensors.pop(f"{index}.{ROWS}") for index in range(len(shapes))]  # each token's keys and values, by layer
        _check_places(tensors["ids"], tensors["places"], about["edited"])
        _check_numbers(rows)
    cache.ids, cache.kept_positions, cache.edited = tensors["ids"].tolist(), tensors["places"].tolist(), about["edited"]
    for layer, device, shape in zip(cache.layers, devices, shapes, strict=True):
        layer.begin((shape.heads, shape.key, shape.value), rows[0].dtype, device)  # allocates memory on the host
        layer.append(*layer.view(rows.pop(0)))  # viewed as keys and values of heads
        layer.store.release()  # drops a mapped file's pages from memory
    return cache


def _check_rows(found: dict[str, Entry], shapes: list[LayerShape]) -> None:
    """Raise InvalidError, for `load_lossless`, unless a file has ids, places, and as many rows of one dtype for each layer.

    found: dtype and shape of each tensor in the file's header. A row has a token's keys of all heads, then its values. Places
    are the tokens' positions.
    """
    wanted = {f"{index}.{ROWS}": shape.heads * (shape.key + shape.value) for index, shape in enumerate(shapes)}
    if found.keys() != {"ids", "places", *wanted}:
        raise InvalidError(f"it holds {', '.join(sorted(found)):.80}, not ids, places and the rows of {len(shapes)} layers")
    dtype, (count, *_) = found[f"0.{ROWS}"].dtype, found["places"].shape
    if dtype not in FLOATS:
        raise InvalidError(f"its rows are {dtype}")
    for name, width in wanted.items():
        entry = found[name]
        if entry != Entry(dtype, (count, width)):
            raise InvalidError(f"{name} is {entry.dtype} {list(entry.shape)} where {dtype} [{count}, {width}] belongs")


def _check_places(ids_T: Tensor, places_N: Tensor, edited: int) -> None:
    """Raise InvalidError, for `load_lossless`, unless `places` (positions of kept tokens) increase and none is missing later.

    edited: of the first so many of the text's T tokens, edits may have taken some out; all tokens after these must be there.
    """
    T, newest = len(ids_T), places_N[places_N >= edited]
    if bool((ids_T < 0).any()):
        raise InvalidError("ids holds a number that is no token")
    if edited > T or not torch.equal(newest, torch.arange(edited, T, device="cpu")):
        raise InvalidError(f"places are not those of {T} tokens, of which the first {edited} were edited")
    if bool((places_N < 0).any()) or bool((places_N.diff() <= 0).any()):
        raise InvalidError("places are not in order")


def _check_numbers(rows: list[Tensor]) -> None:
    """Raise InvalidError, for `load_lossless`, for keys or values that are not finite.

    rows: of each layer [N,E]: N tokens' keys and values of all heads side by side.
    """
    for index, rows_NE in enumerate(rows):
        if not bool(rows_NE.isfinite().all()):
            raise InvalidError(f"layer {index}: keys or values are not finite")
