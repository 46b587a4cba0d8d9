"""A CUDA graph for machines without CUDA: records every operation of a function, and repeats them on the same memory.

As on a device, capturing carries nothing out, Python is not run again, and a tensor's value may not be read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tools.bench.counting import launching

# the host would wait for the device: values are read there, or Python's numbers (lift_fresh: torch.tensor) are copied to it
WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "unique", "lift_fresh")


class FakeRecorder:
    """Stands for kvpatch.hooks.graph.CudaRecorder."""

    def __init__(self, device: torch.device) -> None:
        self.steps: list[Callable[[], None]] = []

    def capture(self, run: Callable[[], None]) -> None:
        seen = _Recording(self.steps)
        with launching(seen.launch), seen:
            run()
        for tensor, before in seen.before.values():
            tensor.copy_(before)

    def replay(self) -> None:
        for step in self.steps:
            step()


class _Recording(TorchDispatchMode):
    """before: outer memory that was written to, as flat bytes, and its contents before."""

    def __init__(self, steps: list[Callable[[], None]]) -> None:
        super().__init__()
        self.steps, self.own = steps, set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.alive: list[Any] = []  # no memory is given out twice

    def launch(self, name: str, run: Callable[[], None]) -> None:
        """Record the launch of a Triton kernel, which may write to any of its tensors."""
        given = [one for one in inspect.getclosurevars(run).nonlocals["args"] if isinstance(one, Tensor)]
        for tensor in given:
            self._keep(tensor)
        self.alive.append(given)
        with _disable_current_modes():
            run()
        self.steps.append(run)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.split("::")[1] in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        memory = {_memory(one) for one in given}
        for spec, one in zip(func._schema.arguments, args, strict=False):
            if spec.is_write:
                for tensor in tree_leaves(one):
                    if isinstance(tensor, Tensor):
                        self._keep(tensor)
        for spec in func._schema.arguments:
            if spec.is_write and isinstance(kwargs.get(spec.name), Tensor):
                self._keep(kwargs[spec.name])
        out = func(*args, **kwargs)
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        self.alive.append((args, kwargs, out))
        new = [one for one in made if _memory(one) not in memory]
        self.own.update(_memory(one) for one in new)
        writes = any(spec.is_write for spec in func._schema.arguments)
        if writes or new:
            self.steps.append(lambda: _again(func, args, kwargs, [] if writes else made))
        return out

    def _keep(self, tensor: Tensor) -> None:
        at = _memory(tensor)
        if at not in self.own and at not in self.before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self.before[at] = (whole, whole.clone())


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again(func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
    """Run an operation again; what it returned anew is written to where it was."""
    found = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, Tensor)]
    for old, new in zip(made, found, strict=bool(made)):
        if _memory(old) != _memory(new):
            old.copy_(new)
