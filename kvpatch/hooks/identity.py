"""Identity of a model, by which caches, prefixes, files and calibrations know theirs.

Two forms of it: a stamp (cache/model_stamp.py), cheap enough for every prompt, and a description in plain values for files.

A stamp sees what torch counts as a change in place (`Tensor._version`: optimizers, load_state_dict, copy_) and the first
numbers of every parameter, however they were changed: fused optimizers, `param.data.copy_`, weights that were loaded anew.
It does not see a change through `param.data` that leaves these numbers alone, nor any of weights that are offloaded
(accelerate) or sharded by FSDP or DeepSpeed, which are elsewhere between passes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..cache.cache import EvictingCache
from ..cache.model_stamp import BASE, ModelStamp
from ..cache.prefix import Prefix
from .accelerate import list_parts, list_weights

FEW = 16  # how many numbers of each weight a stamp or description has


def stamp_model(decoder: nn.Module) -> ModelStamp:
    """Make a decoder's stamp: a fingerprint by which a cache knows the model that has read it. Changes nothing.

    `note_reader` calls it before each prompt, `save_cache` and `is_read_alike` to compare it. It holds PEFT's active adapters,
    and of the weights the layout, torch's counters of changes in place and first numbers.
    """
    weights, tuned = _walk_modules(decoder)
    versions, first_numbers = list[int](), dict[Any, list[Tensor]]()  # the latter by device and dtype
    layout = hash(tuple([(weight.dtype, weight.shape) for weight in weights]))
    with torch.no_grad():
        for weight in weights:
            if weight.is_meta:  # its numbers are elsewhere (offloaded)
                continue
            # inference tensors have no counter of changes
            versions.append(0 if weight.is_inference() else weight._version)
            for part in (weight,) if type(weight) in _PLAIN else list_parts(weight):
                if part.numel():
                    first_numbers.setdefault((part.device, part.dtype), []).append(_read_first(part))
        sample = tuple(torch.cat(numbers).view(torch.uint8) for numbers in first_numbers.values())
    adapters, acting = _list_adapters(tuned)
    return ModelStamp(weakref.ref(decoder), adapters, acting, layout, hash(tuple(versions)), sample)


def is_read_alike(decoder: nn.Module, cache: EvictingCache | Prefix) -> bool:
    """Tell if the model that has read a cache or prefix computes as this one does now: by the same weights and adapters."""
    return cache.model_stamp is not None and cache.model_stamp.differs(stamp_model(decoder)) is None


_PLAIN = (nn.Parameter, Tensor)


def _walk_modules(decoder: nn.Module) -> tuple[list[Tensor], list[nn.Module]]:
    """Return a decoder's parameters, and those of its modules that have PEFT's adapters.

    `describe_weights` calls it for files, `stamp_model` before each prompt, to show if another model has read a cache, or this
    one has changed since. There are no parameters if FSDP or DeepSpeed shard them: they are elsewhere between passes.
    """
    weights, tuned, unvisited, sharded = list[Tensor](), list[nn.Module](), [decoder], False
    while unvisited:  # nn.Module.modules() takes several times as long
        module = unvisited.pop()
        attributes = vars(module)
        has_adapters, is_sharded = _find_traits(cast(Any, type(module)))
        weights += [weight for weight in attributes["_parameters"].values() if weight is not None]
        unvisited += [child for child in attributes["_modules"].values() if child is not None]
        if has_adapters or "_disable_adapters" in attributes:
            tuned.append(module)
        sharded = sharded or is_sharded or "_fsdp_wrapped_module" in attributes["_modules"]
    if sharded or any("_fsdp_flattened" in vars(weight) or "ds_id" in vars(weight) for weight in weights):
        return [], tuned
    return weights, tuned


@functools.cache
def _find_traits(kind: Any) -> tuple[bool, bool]:
    """Tell of a class of modules whether it is a PEFT layer, which has adapters, and whether FSDP has sharded its modules."""
    return hasattr(kind, "_disable_adapters"), hasattr(kind, "_get_fsdp_state")


def _read_first(part: Tensor) -> Tensor:
    """Return a view of a tensor's first FEW numbers, for `stamp_model`: a model's fingerprint has those of each weight."""
    if part.is_contiguous():
        return part.as_strided((min(part.numel(), FEW),), (1,))
    return part[(0,) * (part.ndim - 1)][:FEW]


# ---- adapters ----


def _list_adapters(tuned: list[nn.Module]) -> tuple[tuple[str, ...], int]:
    """Return the names of PEFT's active adapters, and a hash of which ones are active in which module, with which scale.

    `stamp_model` calls it before each prompt, `describe_weights` for files. tuned: modules that have adapters. If generate()
    was given adapter_names, the names are one for each row, and the hash is 0.
    """
    rows = next((names for module in tuned if (names := adapter_names(module)) is not None), None)
    if rows is not None:
        return tuple(BASE if name == "__base__" else name for name in rows), 0
    acting = [_list_acting(module) for module in tuned]
    names = sorted({name for adapters in acting for name, _ in adapters})
    return (" + ".join(names) or BASE,), hash(tuple(acting))


def _list_acting(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """Return the adapters of PEFT that change what a module computes now, for `_list_adapters`: (name, scale) of each.

    Of an adapter that is merged into the weights the scale is None.
    """
    attributes = vars(module)
    if attributes.get("_disable_adapters", False):
        return ()
    merged = attributes.get("merged_adapters", ())
    if merged:
        return tuple((f"{name} (merged)", None) for name in merged)
    active = attributes.get("_active_adapter", ())
    names = (active,) if isinstance(active, str) else active
    # PEFT keeps the layers of all adapters of this module in dicts by name; an active adapter may have none here
    tables = [attributes["_modules"].get(name) for name in getattr(type(module), "adapter_layer_names", ())]
    present = {name for one in tables if one is not None for name in vars(one).get("_modules") or vars(one).get("_keys", ())}
    scales = attributes.get("scaling", {})
    return tuple((name, scales.get(name)) for name in names if name in present)


def adapter_names(module: nn.Module) -> list[str] | None:
    """Return each row's adapter in the running pass, if generate() or a forward was given PEFT's adapter_names; else None.

    `_list_adapters` and `_refuse_mixed` call it. PEFT keeps these names in a hook of each module while the pass runs.
    """
    for hook in module._forward_pre_hooks.values():
        names = hook.keywords.get("adapter_names") if isinstance(hook, functools.partial) else None
        if names is not None:
            return list(names)
    return None


# ---- files ----


def describe_weights(decoder: nn.Module) -> dict[str, Any]:
    """Describe a model's weights, for `Target.identity`, which notes them in a calibration's or cache's file or compares them.

    The result has a hash of the first numbers of each weight, the quantization and the active adapters.
    """
    digest = hashlib.sha256()
    for name, weight in list_weights(decoder):
        first = weight.flatten()[:FEW]
        digest.update(name.encode() + (b"" if first.is_meta else first.float().cpu().numpy().tobytes()))
    about: dict[str, Any] = {"weights": digest.hexdigest()[:16]}
    tuned = _walk_modules(decoder)[1]
    if tuned:
        about["adapters"] = ", ".join(_list_adapters(tuned)[0])
    quantized = getattr(getattr(decoder, "config", None), "quantization_config", None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else getattr(quantized, "quant_method", None)
        about["quantized"] = str(getattr(method, "value", method))
    return about


_ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")


def describe_rotation(decoder: nn.Module) -> dict[str, Any]:
    """Return {"rotation": what the configuration says of rotary positions}, for a cache's file, or {} if it says nothing.

    Cached keys are rotated, and no weight shows how: YaRN and another base are set in the configuration alone. `save_cache` and
    `load_cache` call it. The values are as JSON gives them back.
    """
    config: Any = getattr(decoder, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    said = {name: value for name in _ROTATION if (value := getattr(config, name, None)) is not None}
    return {"rotation": json.loads(json.dumps(said, default=str))} if said else {}
