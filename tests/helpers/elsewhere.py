"""A second device for machines that have none: CPU tensors that say they lie on "cpu:1", and refuse to meet others.

Inside `second_device()` whatever is made or moved there (`device="cpu:1"`, `.to("cpu:1")`) is an Elsewhere: its numbers are an
ordinary tensor's, every operation on it runs on the CPU, and one that mixes it with a tensor of the first device raises as it
would between two GPUs. (Tensors of one number without axes may be mixed, as there, and so may what is copied or indexed with.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

SECOND = torch.device("cpu:1")
_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)


class Elsewhere(Tensor):
    """A tensor on the second device; `inner` holds its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls: type[Elsewhere], inner: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=SECOND
        )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Elsewhere({self.inner})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Elsewhere:
        return Elsewhere(self.inner.clone())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.inner.tolist()

    def as_subclass(self, cls: type[Tensor]) -> Tensor:
        """A tensor of both classes: as a subclass of Tensor alone it would lie on no device."""
        return type(cls.__name__, (Elsewhere, cls), {})(self.inner)

    __torch_function__ = torch._C._disabled_torch_function_impl


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    there = [one for one in tensors if isinstance(one, Elsewhere)]
    if func in _INDEXED:  # indices may come from the CPU
        there, tensors = ([args[0]], [args[0]]) if isinstance(args[0], Elsewhere) else ([], tensors)
    if there and func not in _MOVES and any(one.ndim and not isinstance(one, Elsewhere) for one in tensors):
        raise RuntimeError(f"{func} got tensors on two devices")
    target = kwargs.get("device")
    goes = bool(there) if target is None else torch.device(target) == SECOND
    if func is torch.ops.aten.copy_.default:
        goes = isinstance(args[0], Elsewhere)
    if target is not None and torch.device(target) == SECOND:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    own = {id(one.inner): one for one in there}
    plain = tree_map(lambda one: one.inner if isinstance(one, Elsewhere) else one, (args, kwargs))
    out = func(*plain[0], **plain[1])

    def wrap(one: Any) -> Any:
        if not isinstance(one, Tensor) or isinstance(one, Elsewhere):
            return one
        return own.get(id(one)) if id(one) in own and goes else Elsewhere(one) if goes else one

    return tree_map(wrap, out)


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """torch.tensor(numbers, device=...) is the one that makes tensors without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == SECOND:
            return torch.tensor(*args, **{**kwargs, "device": "cpu"}).to(SECOND)
        return func(*args, **kwargs)


@contextmanager
def second_device() -> Iterator[None]:
    """torch with a second device."""
    with _Ops(), _Literals():
        yield


def move(module: nn.Module) -> None:
    """What `module.to("cpu:1")` would do."""
    for one in module.modules():
        for name, parameter in one.named_parameters(recurse=False):
            one._parameters[name] = nn.Parameter(Elsewhere(parameter.detach()), requires_grad=False)
        for name, buffer in one.named_buffers(recurse=False):
            one._buffers[name] = Elsewhere(buffer.detach())
