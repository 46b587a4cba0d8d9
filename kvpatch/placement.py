"""Where the parts of a model lie: accelerate's hooks bring weights to where they are used, and inputs to the weights.

Such a hook keeps a module's own forward in `_old_forward` and stands in for `forward` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_PLACES = ("forward", "_old_forward")


def replace_forward(module: nn.Module, make: Callable[[Any], Callable[..., Any]]) -> Callable[[], None]:
    """Give `module` the forward that `make` makes of the one it had as an attribute (or None); returns what undoes it.

    Hooks may come and go in between: the forward is taken out again where it then lies.
    """
    own = vars(module)
    name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
    before = own.pop(name, None)
    mine = own[name] = MethodType(make(before), module)

    def undo() -> None:
        place = next((place for place in _PLACES if own.get(place) is mine), name)
        if before is None and place == "forward":
            own.pop(place, None)
        else:
            own[place] = MethodType(type(module).forward, module) if before is None else before

    return undo


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes, which is not always where its weights are kept."""
    for one in module.modules():
        for hook in _hooks(one):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return next(module.parameters()).device


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters by name; those that hooks keep elsewhere are fetched from there."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            kept = [hook.weights_map for hook in _hooks(module) if getattr(hook, "weights_map", None) is not None]
            yield f"{prefix}.{name}", kept[0][name] if parameter.is_meta and kept else parameter.detach()


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else (hook, *getattr(hook, "hooks", ()))
