"""Counts the operations for which the host would wait for a GPU: on the CPU the same ones are called, and nothing waits."""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvpatch

PACKAGE = str(Path(kvpatch.__file__).parent)
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "is_nonzero"}
FACTORIES = (torch.tensor, torch.as_tensor)


class HostWaits:
    """Context manager; `at` counts waits by the line of kvpatch that caused them, `total` is their sum.

    A read of a tensor's numbers waits for the device, as does a copy of Python numbers to it, torch.tensor(list, device=).
    A device by its name, "cpu", is the host.
    """

    def __init__(self):
        self.at = Counter()
        self._modes = (_Functions(self), _Operators(self))

    @property
    def total(self):
        return sum(self.at.values())

    def note(self, what):
        frame = sys._getframe(2)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is not None:  # the model's own waits are not counted
            self.at[f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_lineno} {what}"] += 1

    def __enter__(self):
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Functions(TorchFunctionMode):
    """tolist() is no operator, and so seen here alone."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.tolist or (function in FACTORIES and isinstance(kwargs.get("device"), torch.device)):
            self.waits.note(function.__name__)
        return function(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in READS or by_mask:
            self.waits.note(name)
        return operator(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(one.numel() for one in tree_leaves(out) if isinstance(one, torch.Tensor))])
        return out
