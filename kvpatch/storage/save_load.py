"""Saved caches: a file that names its model, policy and budget, and is refused where one does not match."""

from __future__ import annotations

from operator import attrgetter
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from ..backends.entries import centre_codecs, codecs
from ..cache import slots
from ..cache.cache import EvictingCache
from ..cache.layer import SlotLayer
from ..cache.modes import MODES, Reading
from ..cache.narrow import make_prompt_slots
from ..cache.state import RowAlignment, Turns, writable
from ..cache.token_ids import TokenIds
from ..errors import KVPatchError
from ..policies import Policy
from ..policies.context import SIZES, Limits
from . import contents, schema
from .header import Entry
from .kinds import CACHE, Description, Document


def save(cache: EvictingCache, path: str | PathLike[str], model: Description) -> None:
    """Write `cache` to the file `path`, for `save_cache`; `model` holds the values that identify its model.

    Raises:
        KVPatchError: the cache is empty, or in the middle of a prompt or of a forward pass, or the file cannot be written.
    """
    cache.refuse_unfinished()
    if not cache.get_seq_length():
        raise KVPatchError("The cache is empty: there is nothing to save. Run a prompt through it first.")
    if cache.turns.unfinished:  # a prompt in several passes has begun and not ended
        raise KVPatchError("The cache is in the middle of a prompt: read it to its end, then save.")
    with cache.reading("save_cache()"):  # raises if another thread changes it meanwhile
        about, tensors = _describe_cache(cache, model)
    CACHE.write_file(path, about, tensors)


def _describe_cache(cache: EvictingCache, model: Description) -> tuple[Description, dict[str, Tensor]]:
    """Return what a file holds of a cache: its state as JSON values, and copies of all its tensors on the CPU.

    `save` calls it. Tensors of layer 0 are named "0.NAME". The model's identity and the settings are noted, to be compared.
    """
    rows = {name: attrgetter(attribute)(cache) for name, attribute in schema.ROWS.items()} | {"ids": cache.ids.ids_BT}
    tensors = {name: tensor for name, tensor in rows.items() if tensor is not None}
    layers = []
    for index, layer in enumerate(cache.layers):
        # of a layer: positions and numbers of heads, keys and values, free slots, and what the policy stores for each key
        found = {name: getattr(layer, name) for name in schema.TENSORS if getattr(layer, name) is not None}
        found |= dict(zip(("keys", "values"), layer.kv.stored, strict=False))  # keys alone if values are a part of them
        found |= {} if layer.kv.centre is None else {"centre_BH1D": layer.kv.centre}
        found |= {"free_BH": layer.mode.free_BH} if layer.mode.fills_free_slots else {}
        found |= {f"state.{name}": tensor for name, tensor in layer.state.items()}
        notes = layer.need_notes.items()  # what the policy remembers of the layer
        found |= {f"{need}.{name}": tensor for need, note in notes for name, tensor in vars(note).items() if tensor is not None}
        tensors |= {f"{index}.{name}": tensor for name, tensor in found.items()}
        about = {name: getattr(layer, attribute) for name, attribute in schema.ATTRIBUTES.items()}
        about |= {"mode": layer.mode.name, "dtype": str(layer.dtype)}
        about |= {name: getattr(layer.mode, attribute) for name, attribute in layer.mode.saved.items()}  # the mode's counters
        # head_offsets: slots of each head, and how many are filled, if heads have different lengths. limits: protected tokens
        heads = None if (offsets := layer.kv.head_offsets) is None else [offsets.capacities, offsets.filled]
        layers.append(about | {"head_offsets": heads, "limits": _list_limits(layer.limits)})
    tensors |= {f"states.{name}": state for name, state in cache.states.tensors().items()}
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    values = {"model": model, "settings": cache.settings.described(), "cache": _describe_history(cache), "layers": layers}
    return CACHE.make_description(**values), tensors


@writable  # outside inference mode: the tensors made here are changed later
def load(
    cache: EvictingCache,
    path: str | PathLike[str],
    model: Description,
    shapes: list[schema.LayerShape],
    devices: list[torch.device],
) -> EvictingCache:
    """Read a saved cache into `cache`, for `load_cache`, and return it.

    Its header is checked first, and memory is allocated for tensors only if the header fits the model and the patch; then the
    values are checked.

    Args:
        cache: an empty cache of the patch.
        path: the file.
        model: values that identify the model.
        shapes: shapes of the model's layers.
        devices: device of each layer.

    Raises:
        KVPatchError: the file is missing, truncated or altered, or belongs to another model, policy, budget or seed.
    """
    with CACHE.reading(path):
        about, tensors, _ = _read_file(path, cache, model, shapes)
        _restore_cache(cache, about, tensors, shapes, devices)
        contents.check_cache(cache)
    cache.unstack_layers(due=True)  # the next decode step joins layers' tensors, to compute them as one
    return cache


def _restore_cache(
    cache: EvictingCache,
    about: Description,
    tensors: dict[str, Tensor],
    shapes: list[schema.LayerShape],
    devices: list[torch.device],
) -> None:
    """Fill an empty cache in place with a file's tensors, for `load`; its budget in bytes is converted for their dtype.

    about: the file's description, checked and used up here. devices: of each layer.
    """
    _restore_history(cache, about["cache"])
    cache.ids = TokenIds.of(tensors["ids"].to(devices[0]) if "ids" in tensors else None)
    for name, attribute in schema.ROWS.items():
        owner, _, field = attribute.rpartition(".")
        setattr(getattr(cache, owner) if owner else cache, field, tensors[name].to(devices[0]) if name in tensors else None)
    for index, (layer, described) in enumerate(zip(cache.layers, about["layers"], strict=True)):
        found = {name.split(".", 1)[1]: t.to(devices[index]) for name, t in tensors.items() if name.startswith(f"{index}.")}
        _restore_layer(cache, layer, found, described, shapes[index], cache.settings.policies[index])
    cache.settings = cache.settings.in_dtype(cache.layers[0].dtype)  # a budget in bytes depends on it
    states = {name.removeprefix("states."): state for name, state in tensors.items() if name.startswith("states.")}
    cache.states.fill_states({name: state.to(devices[0]) for name, state in states.items()})


def _restore_layer(
    cache: EvictingCache,
    layer: SlotLayer,
    tensors: dict[str, Tensor],
    described: Description,
    shape: schema.LayerShape,
    policy: Policy,
) -> None:
    """Set an empty layer's attributes from a file, for `_restore_cache`. tensors, described: by name; both are used up."""
    # the mode (how decode steps store and evict), with its counters and each head's free slot; then the other attributes
    head_offsets, limits, mode = described.pop("head_offsets"), described.pop("limits"), MODES[described.pop("mode")]
    layer.dtype = schema.DTYPES[described.pop("dtype")]
    counters = {attribute: described.pop(name) for name, attribute in mode.saved.items()}
    layer.mode = mode(**counters, **({"free_BH": tensors.pop("free_BH")} if mode.fills_free_slots else {}))
    for name, attribute in schema.ATTRIBUTES.items():
        setattr(layer, attribute, described[name])
    # keys and values. A prompt that is still read is not rounded; later, keys are rounded around a centre
    keys = tensors.pop("keys")
    values = keys[..., : shape.value] if layer.latent else tensors.pop("values")
    if isinstance(layer.mode, Reading):
        layer.kv = make_prompt_slots(keys, values, layer.bits, layer.latent)  # latent: a value is a part of its key
    else:
        uncentred = codecs(layer.bits, shape.key, shape.value, layer.dtype, layer.latent)
        centred = centre_codecs(uncentred, tensors.pop("centre_BH1D", None))
        layer.kv = slots.restore_slots(keys, values, head_offsets, centred)
    # what the policy remembers of the layer (notes), and what it stores for each key (state)
    for need in policy.needs:  # what its score reads
        saved = {name: f"{need.name}.{name}" for name in need.saved({})}
        if need.note is not None and all(key in tensors for key in saved.values()):
            layer.need_notes[need.name] = need.note(**{name: tensors.pop(key) for name, key in saved.items()})
    for name, tensor in tensors.items():
        if name.startswith("state."):
            layer.state[name.removeprefix("state.")] = tensor
        else:
            setattr(layer, name, tensor)
    layer.is_initialized, layer.device = True, layer.kv.keys.device
    if limits is not None:
        layer.limits = cache.limits(limits, layer.device)  # numbers of protected tokens, by row


def _list_limits(limits: Limits | None) -> list[list[int]] | None:
    """Return the protected sizes of each batch row of a layer, in the order of SIZES, as a list by row for `_describe_cache`.

    None for a layer without limits, from which nothing is evicted.
    """
    if limits is None:
        return None
    columns = [getattr(limits, name).flatten().tolist() for name in SIZES]
    return [list(row) for row in zip(*columns, strict=True)]


def _describe_history(cache: EvictingCache) -> Description:
    """Return what a cache has read (steps, a chat's turns, padding, joined rows, edits), for `_describe_cache`, as JSON values.

    joined: rows are at different positions of their texts. by_columns: positions count padding columns.
    """
    turns, rows = cache.turns, cache.rows
    flags = {"joined": rows.concatenated, "padded": rows.padded, "by_columns": rows.by_columns}
    edited = {"edited": rows.columns_at_edit} if rows.columns_at_edit else {}
    return {"steps": cache.counters.steps, "turns": turns.prompts_read, "turn_from_B": turns.begin_B, **flags, **edited}


def _restore_history(cache: EvictingCache, about: Description) -> None:
    """Set what a cache has read from what `_describe_history` wrote, for `_restore_cache`. about: used up."""
    cache.counters.steps = about.pop("steps")
    cache.turns = Turns(about.pop("turns"), about.pop("turn_from_B"))
    concatenated, columns_at_edit = about.pop("joined"), about.pop("edited", 0)
    cache.rows = RowAlignment(concatenated=concatenated, columns_at_edit=columns_at_edit, **about)


def _read_file(
    path: str | PathLike[str], cache: EvictingCache, model: Description, shapes: list[schema.LayerShape]
) -> Document:
    """Read a file's description and tensors, for `load`. Before tensors are read, check that the header fits the `cache`.

    Raises KVPatchError for another model or other settings, InvalidError for a header that contradicts them.
    """

    def check_header(about: Description, found: dict[str, Entry]) -> None:
        compare_tables("model", about["model"], model, path)
        compare_tables("settings", about["settings"], cache.settings.described(), path)
        schema.check_header(about, found, cache, shapes)

    return CACHE.read_file(path, check_header)


def compare_tables(what: str, saved: Description, mine: Description, path: object) -> None:
    """Raise KVPatchError if a file to load was saved under another model or settings; it names the first value that differs.

    The `check_header` of `_read_file` and of `load_lossless` call it; for tables in tables it calls itself. what: "model" or
    "settings". saved: the values in the file. mine: those of the patch that loads it.
    """
    for name in [*saved, *(name for name in mine if name not in saved)]:
        old, new = saved.get(name), mine.get(name)
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                compare_tables(f"{what}'s {name}", old, new, path)
            there, here = _unite_layers(old), _unite_layers(new)
            raise KVPatchError(
                f"{path} was saved under another {what}: {name} is {there!r} there and {here!r} here. A cache only continues "
                "under what it was made with: load it under that, or read the text again."
            )


def _unite_layers(value: Any) -> Any:
    """Return the one value of a list that has the same for every layer, for a message; other values as they are."""
    is_same = isinstance(value, list) and value and all(one == value[0] for one in value)
    return value[0] if is_same else value
