"""Tensor parallelism by transformers' tp_plan: the KV heads of each layer on this process, read from the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..arch.adapter import Adapter
from ..errors import KVPatchError
from ..policies.parallel import WHOLE, Parallel


def parallel_of(model: nn.Module, attentions: list[tuple[nn.Module, Adapter]]) -> Parallel:
    """Return how `model` is shared among processes, for `Target.find`; WHOLE if every process computes all heads.

    attentions: its attention modules, each with its adapter.

    Raises:
        KVPatchError: heads cannot be divided evenly, or the sharding is of another kind.
    """
    holder = next((m for m in model.modules() if (getattr(m, "tp_size", None) or 1) > 1), None)  # loaded with a tp_plan
    if holder is None:
        _refuse_unknown(model, attentions)
        return WHOLE
    # the plan has a style of sharding for each weight, by its module's name with * for the number of the layer
    names = {id(module): re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, module in holder.named_modules()}
    plan: dict[str, str] = holder.tp_plan or {}  # type: ignore[assignment]
    if "sequence_parallel" in plan.values():
        raise KVPatchError(
            "The tp_plan shards the sequence ('sequence_parallel'), but a cache needs whole prompts: leave those rules out of "
            "the plan."
        )
    # if the output projection takes a part of the heads, each process computes its own part
    styles = {plan.get(f"{names[id(module)]}.{adapter.projection}") for module, adapter in attentions}
    if "rowwise" not in styles:
        return WHOLE
    mesh = _find_mesh(holder, attentions)
    size = mesh.size()
    for module, adapter in attentions:
        heads, _ = adapter.kv_shape(module)
        if heads % size:
            raise KVPatchError(
                f"{size} processes cannot share the {heads} KV heads of a layer evenly: start a number of processes that "
                f"divides {heads} (torchrun --nproc-per-node)."
            )
    return Parallel(size, mesh.get_local_rank(), mesh.get_group())


def _find_mesh(holder: Any, attentions: list[tuple[nn.Module, Adapter]]) -> Any:
    """Return, for `parallel_of`, the one-dimensional device mesh of the processes that share a layer's heads."""
    module, adapter = attentions[0]
    weight = getattr(getattr(module, str(adapter.projection)), "weight", None)
    mesh = getattr(weight, "device_mesh", None) or holder._device_mesh  # versions before DTensor weights
    return mesh if mesh.ndim == 1 else mesh["tp"]


def _refuse_unknown(model: nn.Module, attentions: list[tuple[nn.Module, Adapter]]) -> None:
    """Raise KVPatchError, for `parallel_of`, if attention weights are sharded by hand: nothing tells each process' heads."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return  # weights are gathered whenever they are used
    for parameter in (parameter for module, _ in attentions for parameter in module.parameters()):
        if isinstance(parameter, DTensor) and any(isinstance(place, Shard) for place in parameter.placements):
            raise KVPatchError(
                "Attention weights are sharded by something other than transformers, so that nothing says which heads are on "
                "this process: load the model with from_pretrained(..., tp_plan='auto')."
            )


def check_layers(layers: list[int], expected: Sequence[int] | None = None) -> None:
    """Raise KVPatchError, for `Target.find`, if a decoder's layers share a number or are not all on this process.

    layers: their numbers, ascending. expected: numbers of a hybrid's attention layers.
    """
    if len(set(layers)) < len(layers):
        raise KVPatchError(
            f"Attention modules of this model share a layer_idx ({layers}): it passes through its layers more than once per "
            "token, with a cache for each time, which kvpatch does not serve."
        )
    if layers != list(range(len(layers)) if expected is None else expected):
        raise KVPatchError(
            f"Of this model's layers only {layers} are on this process (pipeline parallel), but a budget counts all of them: "
            "load it with tp_plan='auto' (tensor parallel) or with a device_map."
        )
