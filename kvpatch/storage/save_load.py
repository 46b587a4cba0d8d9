"""Saved caches: a safetensors file with a description in JSON, and nothing that could run code.

The file names its model, policy and budget and carries a checksum; a file that does not match is refused.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends.entries import centred, codecs
from ..cache import slots
from ..cache.cache import EvictingCache
from ..cache.layer import SlotLayer
from ..cache.modes import MODES, Reading
from ..cache.narrow import reading
from ..cache.state import Rows, Turns, writable
from ..cache.token_ids import TokenIds
from ..errors import InvalidError, KVPatchError
from ..policies import Policy
from ..policies.context import SIZES, Limits
from . import contents, schema
from .file import checksum, readable, verify_checksum, write
from .header import entries, parse, read

FORMAT = "kvpatch cache 5"
_ROWS, _LAYER, _TENSORS = schema.ROWS, schema.LAYER, schema.TENSORS


def save(cache: EvictingCache, path: str | PathLike[str], model: dict[str, Any]) -> None:
    """Write `cache` to the file `path`; `model` holds the values that identify its model.

    Raises:
        KVPatchError: the cache is empty, or in the middle of a prompt or of a forward pass, or the file cannot be written.
    """
    cache.check_finished()
    if not cache.get_seq_length():
        raise KVPatchError("The cache is empty: there is nothing to save. Run a prompt through it first.")
    if cache.turns.open:
        raise KVPatchError("The cache is in the middle of a prompt: read it to its end, then save.")
    with cache.reading("save_cache()"):
        tensors, about = _described(cache, model)
    text = json.dumps(about)
    write(path, tensors, {"kvpatch": text, "checksum": checksum(text, tensors)}, "cache")


def _described(cache: EvictingCache, model: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors of a cache, on the CPU, and the rest of its state as plain values."""
    shortfall_B, gaps_B = cache.counters.shortfall_B, cache.rows.gaps_B
    rows = {"seen_B": cache.seen_B, "shared": cache.shared, "shortfall_B": shortfall_B, "gaps_B": gaps_B}
    rows["ids"] = cache.ids.ids_BT
    tensors = {name: tensor for name, tensor in rows.items() if tensor is not None}
    layers = []
    for index, layer in enumerate(cache.layers):
        own = {name: getattr(layer, name) for name in _TENSORS if getattr(layer, name) is not None}
        own |= dict(zip(("keys", "values"), layer.kv.stored, strict=False))
        own |= {} if layer.kv.centre is None else {"centre_BH1D": layer.kv.centre}
        own |= {"free_BH": layer.mode.free_BH} if layer.mode.slotted else {}
        own |= {f"state.{name}": tensor for name, tensor in layer.state.items()}
        notes = layer.notes.items()
        own |= {f"{need}.{name}": tensor for need, note in notes for name, tensor in vars(note).items() if tensor is not None}
        tensors |= {f"{index}.{name}": tensor for name, tensor in own.items()}
        counts = {name: getattr(layer.mode, name) for name in layer.mode.saved}
        beside = {"mode": layer.mode.name, "dtype": str(layer.dtype), **counts}
        beside |= {"head_offsets": layer.kv.described(), "limits": _rows(layer.limits)}
        layers.append({name: getattr(layer, name) for name in _LAYER} | beside)
    tensors |= {f"states.{name}": state for name, state in cache.states.tensors().items()}
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    about = {
        "format": FORMAT,
        "model": model,
        "settings": cache.settings.described(),
        "cache": _history(cache),
        "layers": layers,
    }
    return tensors, about


@writable
def load(
    cache: EvictingCache,
    path: str | PathLike[str],
    model: dict[str, Any],
    shapes: list[schema.LayerShape],
    devices: list[torch.device],
) -> EvictingCache:
    """Read a saved cache into `cache`.

    The file is not trusted. Its header is checked first, and memory is allocated for tensors only if the header fits the model
    and the patch; then the values are checked. The checksum detects accidents and is no signature: who alters a file on
    purpose can compute it anew.

    Args:
        cache: an empty cache of the patch.
        path: the file.
        model: values that identify the model.
        shapes: shapes of the model's layers.
        devices: device of each layer.

    Raises:
        KVPatchError: the file is missing, truncated or altered, or belongs to another model, policy, budget or seed.
    """
    with readable(path, "saved cache", "save_cache()", "Save it anew with patch.save_cache()."):
        about, tensors = _read(Path(path), cache, model, shapes)
        _restore(cache, about, tensors, shapes, devices)
        contents.check(cache)
    cache.drop_stack(due=True)
    return cache


def _restore(
    cache: EvictingCache,
    about: dict[str, Any],
    tensors: dict[str, Tensor],
    shapes: list[schema.LayerShape],
    devices: list[torch.device],
) -> None:
    _set_history(cache, about["cache"])
    cache.ids = TokenIds.of(tensors["ids"].to(devices[0]) if "ids" in tensors else None)
    for name in _ROWS:
        holder = {"shortfall_B": cache.counters, "gaps_B": cache.rows}.get(name, cache)
        setattr(holder, name, tensors[name].to(devices[0]) if name in tensors else None)
    for index, (layer, described) in enumerate(zip(cache.layers, about["layers"], strict=True)):
        own = {name.split(".", 1)[1]: t.to(devices[index]) for name, t in tensors.items() if name.startswith(f"{index}.")}
        _fill(cache, layer, own, described, shapes[index], cache.settings.policies[index])
    cache.settings = cache.settings.in_dtype(cache.layers[0].dtype)
    states = {name.removeprefix("states."): state for name, state in tensors.items() if name.startswith("states.")}
    cache.states.fill({name: state.to(devices[0]) for name, state in states.items()})


def _fill(
    cache: EvictingCache,
    layer: SlotLayer,
    tensors: dict[str, Tensor],
    described: dict[str, Any],
    shape: schema.LayerShape,
    policy: Policy,
) -> None:
    head_offsets, limits, mode = described.pop("head_offsets"), described.pop("limits"), MODES[described.pop("mode")]
    layer.dtype = schema.DTYPES[described.pop("dtype")]
    counts = {name: described.pop(name) for name in mode.saved}
    layer.mode = mode(**counts, **({"free_BH": tensors.pop("free_BH")} if mode.slotted else {}))
    for name, value in described.items():
        setattr(layer, name, value)
    keys = tensors.pop("keys")
    values = keys[..., : shape.value] if layer.latent else tensors.pop("values")
    if isinstance(layer.mode, Reading):
        layer.kv = reading(keys, values, layer.bits, layer.latent)
    else:
        own = centred(codecs(layer.bits, shape.key, shape.value, layer.dtype, layer.latent), tensors.pop("centre_BH1D", None))
        layer.kv = slots.restored(keys, values, head_offsets, own)
    for need in policy.needs:
        saved = {name: f"{need.name}.{name}" for name in need.saved({})}
        if need.note is not None and all(own in tensors for own in saved.values()):
            layer.notes[need.name] = need.note(**{name: tensors.pop(own) for name, own in saved.items()})
    for name, tensor in tensors.items():
        if name.startswith("state."):
            layer.state[name.removeprefix("state.")] = tensor
        else:
            setattr(layer, name, tensor)
    layer.is_initialized, layer.device = True, layer.kv.keys.device
    if limits is not None:
        layer.limits = cache.limits(limits, layer.device)


def _rows(limits: Limits | None) -> list[list[int]] | None:
    if limits is None:
        return None
    columns = [getattr(limits, name).flatten().tolist() for name in SIZES]
    return [list(row) for row in zip(*columns, strict=True)]


def _history(cache: EvictingCache) -> dict[str, Any]:
    """Return the step counters, turns and row history of a cache as plain values (schema.CACHE)."""
    turns, rows = cache.turns, cache.rows
    flags = {"joined": rows.joined, "padded": rows.padded, "by_columns": rows.by_columns}
    return {"steps": cache.counters.steps, "turns": turns.count, "turn_from_B": turns.begin_B, **flags}


def _set_history(cache: EvictingCache, about: dict[str, Any]) -> None:
    cache.counters.steps = about.pop("steps")
    cache.turns = Turns(about.pop("turns"), about.pop("turn_from_B"))
    cache.rows = Rows(**about)


def _read(
    path: Path, cache: EvictingCache, model: dict[str, Any], shapes: list[schema.LayerShape]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the description and the tensors of a file, and check that they fit the empty cache `cache`."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        texts = file.metadata() or {}
        about = _about(texts.get("kvpatch", ""), path)
        _compare("model", about["model"], model, path)
        _compare("settings", about["settings"], json.loads(json.dumps(cache.settings.described())), path)
        found = entries(file)
        schema.check(about, found, cache, shapes)
        tensors = {name: read(file, name) for name in found}
    verify_checksum(texts.get("checksum"), texts["kvpatch"], tensors)
    return about, tensors


def _about(text: str, path: Path) -> dict[str, Any]:
    """Parse the description, a table of tables."""
    about = parse(text) if text else {}
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise KVPatchError(f"{path} is no cache saved by this version of kvpatch ({FORMAT!r}): read its text again.")
    schema.table("its description", about, ("format", "model", "settings", "cache", "layers"))
    for name in ("model", "settings"):
        if not isinstance(about[name], dict):
            raise InvalidError(f"its {name} is no table")
    return about


def _compare(what: str, saved: dict[str, Any], mine: dict[str, Any], path: object) -> None:
    for name in [*saved, *(name for name in mine if name not in saved)]:
        old, new = saved.get(name), mine.get(name)
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                _compare(f"{what}'s {name}", old, new, path)
            there, here = _say_once(old), _say_once(new)
            raise KVPatchError(
                f"{path} was saved under another {what}: {name} is {there!r} there and {here!r} here. A cache only continues "
                "under what it was made with: load it under that, or read the text again."
            )


def _say_once(value: Any) -> Any:
    """Return a value that a list has for every layer, if it is one for all."""
    alike = isinstance(value, list) and value and all(one == value[0] for one in value)
    return value[0] if alike else value
