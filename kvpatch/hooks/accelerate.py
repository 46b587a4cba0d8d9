"""Placement of a model's parts: accelerate's hooks bring weights to the device that uses them, and inputs to the weights.

Such a hook keeps a module's own forward in `_old_forward` and replaces `forward` itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_PLACES = ("forward", "_old_forward")
OwnMethod = Callable[[Any], Callable[..., Any]]
"""Function of a module, the patched one or a copy of it, that returns a method of that module as it is without the patch."""


def own_method(module: nn.Module, name: str, previous: Callable[..., Any] | None) -> OwnMethod:
    """Return a function `own(module)` that returns the unpatched method `name` of that module, bound to it.

    `replace_forward` and `Installation._install_generate` call it as a model is patched, for the method that they replace. The
    replacement calls `own(self)` later, and `self` may then be a copy of `module`.
    previous: the module's instance attribute `name` before the patch; None: it had none, and the class's method is meant.
    """
    if previous is None:  # the class's method
        return lambda one: functools.partial(getattr(type(one), name), one)
    if getattr(previous, "__self__", None) is module:  # a method bound to the module: bind it to the copy instead
        return functools.partial(MethodType, previous.__func__)  # type: ignore[attr-defined]
    return lambda one: previous  # a plain function, or another object's method: it is called as it is


@dataclass
class ForwardUndo:
    """The undo of a replaced forward. accelerate's hooks may be put on or removed in between, which moves the patch's forward.

    name: attribute that was replaced. before: its value in the instance's attributes, or None. ours: the patch's forward, which
    is looked for in both attributes of `_PLACES`. undone: True once the forward from before the patch is back.
    """

    name: str
    before: Any
    ours: Callable[..., Any]
    undone: bool = False

    def __call__(self, module: nn.Module) -> None:
        """Put the module's forward from before the patch back, for `Installation.restore`; a second call does nothing.

        `ours` is the patch's forward. `before` is the instance attribute that it replaced; None if there was none.
        """
        if self.undone:
            return
        attributes = vars(module)
        # accelerate may have moved our forward from `forward` to `_old_forward` or back since
        found = (name for name in _PLACES if getattr(attributes.get(name), "__func__", None) is self.ours)
        name = next(found, self.name)
        if self.before is None and name == "forward":
            attributes.pop(name, None)  # the class's forward shows again
        else:  # accelerate's hook calls `_old_forward`, so that must not be missing
            attributes[name] = MethodType(type(module).forward, module) if self.before is None else self.before
        self.undone = True


def replace_forward(
    module: nn.Module, make: Callable[[OwnMethod], Callable[..., Any]], register: Callable[[ForwardUndo], None]
) -> None:
    """Replace a module's forward by make(own), where own(module) returns the forward it has without the patch.

    `Installation._change_model` calls it for each attention module as a model is patched. register: called with the undo before
    the attribute `forward` (or `_old_forward`) is changed, so that a change that is interrupted can be undone.
    """
    attributes = vars(module)
    name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"  # accelerate's hook calls `_old_forward`
    before = attributes.get(name)
    ours = make(own_method(module, "forward", before))
    register(ForwardUndo(name, before, ours))
    attributes[name] = MethodType(ours, module)


def replicate(module: nn.Module) -> nn.Module:
    """Replicate a patched module for nn.DataParallel, and bind the patch's forward to the replica instead of the original.

    A patch sets this as a module's `_replicate_for_data_parallel`, which nn.DataParallel calls in each forward pass.
    """
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[operator]
    if isinstance(ours := vars(module).get("forward"), MethodType):
        vars(replica)["forward"] = MethodType(ours.__func__, replica)
    return replica


@dataclass
class HookUndo:
    """The undo of a forward pre-hook or, if `after` is True, of a hook that runs after the forward."""

    hook: Callable[..., Any]
    after: bool = False

    def __call__(self, module: nn.Module) -> None:
        """Remove the hook from the module it was put on, for `Installation.restore`, when the patch is removed."""
        hooks = module._forward_hooks if self.after else module._forward_pre_hooks
        with_kwargs = module._forward_hooks_with_kwargs if self.after else module._forward_pre_hooks_with_kwargs
        for key in [key for key, hook in hooks.items() if hook is self.hook]:
            with_kwargs.pop(key, None)
            hooks.pop(key)


def put_hook(module: nn.Module, hook: Callable[..., Any], register: Callable[[HookUndo], None], after: bool = False) -> None:
    """Put a pre-hook (with `after` a hook after the forward) on a module, for `Installation._change_model`.

    register: called with the undo before the hook is put on.
    """
    register(HookUndo(hook, after))
    if after:
        module.register_forward_hook(hook, with_kwargs=True)
    else:
        module.register_forward_pre_hook(hook, with_kwargs=True)


def device_of(module: nn.Module, decoder: nn.Module | None = None) -> torch.device:
    """Return the device on which a module computes, which is also that of its layer's cache; its weights may be elsewhere.

    `Target.devices` and `Target.list_cases` call it as a model is patched, and before a cache is loaded or compressed.
    accelerate's hooks name the device of offloaded weights. A module without parameters (quantized layers may keep weights in
    buffers) computes where `decoder` does.
    """
    for part in module.modules():
        for hook in _list_hooks(part):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.device(device)
    if decoder is not None and next(module.parameters(), None) is None:
        return device_of(decoder)
    return next(module.parameters()).device


def list_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters by name; `describe_weights` hashes them for the file of a cache or calibration. Changes nothing.

    An offloaded parameter is on the meta device; its numbers are in the `weights_map` of the hook of its module, or of a module
    around this one. Sharded or quantized parameters are yielded as their tensors on this process.
    """
    hooks = [(f"{prefix}." if prefix else "", hook) for prefix, child in model.named_modules() for hook in _list_hooks(child)]
    stores = {prefix: hook.weights_map for prefix, hook in hooks if getattr(hook, "weights_map", None) is not None}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # its numbers are in one of the maps: look at innermost modules first
            matches = (
                store[name.removeprefix(prefix)] for prefix, store in reversed(stores.items()) if name.startswith(prefix)
            )
            parameter = next(matches, parameter)
        for part in list_parts(parameter):
            yield name, part.detach()


def list_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a weight, or the plain tensors that make up a quantized or sharded one.

    `list_weights` calls it to hash them, `stamp_model` to read some of their numbers.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # the attributes that are its inner tensors
        part = getattr(tensor, name)
        if isinstance(part, Tensor):
            yield from list_parts(part)


def _list_hooks(module: nn.Module) -> tuple[Any, ...]:
    """Return accelerate's hook of a module and, if it stands for several (a SequentialHook), these; () without a hook."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else (hook, *getattr(hook, "hooks", ()))
