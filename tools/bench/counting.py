"""Counts what a forward asks of a device: operations that start work there, and waits of the host for a result.

Both are exact and the same on every machine, so that a test can hold them. A view, an allocation and a question about shapes
start nothing. A wait is a number that Python reads from a tensor, or an operation whose output's size depends on data. Triton
kernels are counted where they are launched; Triton's interpreter runs them on the CPU, or nobody does.
"""

import importlib
import os
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvpatch.backends import torch_backend
from kvpatch.backends import triton as kernel_package
from kvpatch.cache.notices import Notices

if not torch.cuda.is_available():  # before Triton is imported, which transformers may do
    os.environ.setdefault("TRITON_INTERPRET", "1")
IDLE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "set_", "promote_types"}
SIZED_BY_DATA = {"nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "bincount"}
READS = {"tolist", "numpy", "cpu"}  # without a dispatched operation if the tensor is on the CPU
COPIES = {"tensor", "as_tensor"}  # of Python's numbers, if they name a device: from memory that is not pinned
Launch = Callable[[str, Callable[[], None]], None]


class Counting(TorchDispatchMode):
    """Counts by name while it is entered. kernels: those of Triton among the launches."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.paused:
            if name == "_local_scalar_dense" or name in SIZED_BY_DATA or (name.startswith("index") and _by_mask(args)):
                self.waits[name] += 1
            # a list that becomes a tensor is copied to the device
            if name == "lift_fresh" or not (func.is_view or name in IDLE or name == "_local_scalar_dense"):
                self.launches[name] += 1
        return func(*args, **(kwargs or {}))

    def launch(self, name: str, run: Callable[[], None]) -> None:
        """Count a kernel, and run it unseen."""
        self.launches[name] += 1
        self.kernels[name] += 1
        self.paused = True
        try:
            run()
        finally:
            self.paused = False


def _by_mask(args: Any) -> bool:
    """Tell whether an indexing operation takes a mask, whose number of entries the host must know."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


class _Reads(TorchFunctionMode):
    """Counts what Python reads from tensors without an operation, and the numbers that it sends to a device."""

    def __init__(self, found: Counting) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        sends = name in COPIES and isinstance((kwargs or {}).get("device"), torch.device)  # "cpu" is the host
        if (name in READS or sends) and not self.found.paused:
            self.found.waits[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Counting]:
    """Count everything within as if it ran on a device; kernels run in Triton's interpreter."""
    found = Counting()
    away, cpu_only = _replaced(_named("at_hand"), lambda name, _: _far_away), _replaced(CPU_ONLY, lambda name, _: _left_out)
    with launching(found.launch), away, cpu_only, _Reads(found), found:
        yield found


def _far_away(tensor: torch.Tensor) -> bool:
    """Tell, in place of `at_hand`, that reading a tensor waits for a device."""
    return False


def _left_out(*given: Any) -> None:
    """Do nothing, in place of a function that only a CPU runs, or in another way."""


Place = tuple[Any, str]
# subnormal numbers are slow on a CPU alone; a warning that depends on a tensor is looked at later on a device
CPU_ONLY: list[Place] = [(torch_backend, "_clear_smallest"), (Notices, "say_if")]


def _named(ending: str, package: str = "kvpatch") -> list[Place]:
    """Find the globals of a package's modules whose names end so."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    return [(module, name) for module in modules for name in vars(module) if name.endswith(ending)]


@contextmanager
def _replaced(places: list[Place], other: Callable[[str, Any], Any]) -> Iterator[None]:
    """Put `other` of its name and itself in the place of each."""
    before = [getattr(*place) for place in places]
    for (module, name), one in zip(places, before, strict=True):
        setattr(module, name, other(name, one))
    try:
        yield
    finally:
        for (module, name), one in zip(places, before, strict=True):
            setattr(module, name, one)


class _Launcher:
    """Stands where a kernel does: `kernel[grid](...)` calls `launch`."""

    def __init__(self, name: str, kernel: Any, launch: Launch) -> None:
        self.name, self.kernel, self.launch = name, kernel, launch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def start(*args: Any, **kwargs: Any) -> None:
            self.launch(self.name, lambda: self.kernel[grid](*args, **kwargs))

        return start


@contextmanager
def launching(launch: Launch) -> Iterator[None]:
    """Hand each launch of a Triton kernel to `launch`: its name, and a function that really launches it."""
    if find_spec("triton"):
        for module in pkgutil.iter_modules(kernel_package.__path__):
            importlib.import_module(f"{kernel_package.__name__}.{module.name}")
    with _replaced(_named("_kernel", kernel_package.__name__), lambda name, kernel: _Launcher(name, kernel, launch)):
        yield


def unlaunched(name: str, run: Callable[[], None]) -> None:
    """Launch nothing: what remains is the host's work, for timing it."""
