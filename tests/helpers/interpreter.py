"""Triton's interpreter, faster and stricter: it runs the library's kernels where there is no GPU.

Other releases of Triton than those whose private names these are keep their own interpreter.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from torch import Tensor


def prepare() -> None:
    """Make the interpreter quick, and its memory bounded."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if {"_LangPatchScope", "_patch_lang", "_get_np_dtype"} <= vars(interpreter).keys():
        _quicken(interpreter)
    if {"_interpreter", "_unwrap_tensor"} <= vars(interpreter).keys() and hasattr(interpreter.GridExecutor, "_init_args_hst"):
        _bound(interpreter)


def _quicken(interpreter: Any) -> None:
    """Replace Triton's language once for a launch; the interpreter by itself does so again for each function within."""
    replace, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    replaced: set[int] = set()  # in the launch that runs

    class Launch(interpreter._LangPatchScope):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def restore(self) -> None:
            replaced.clear()
            self.inner.restore()

    def once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values() if any(value is one for one in languages)}
        if replaced and seen <= replaced:
            return interpreter._LangPatchScope()  # nothing to put back
        scope = replace(function) if replaced else Launch(replace(function))
        replaced.update(seen)
        return scope

    interpreter._patch_lang = once
    look_up = interpreter._get_np_dtype
    known = functools.cache(look_up)

    def data_type(of: Any) -> Any:
        of = of.element_ty if isinstance(of, interpreter.tl.block_type) else of
        return look_up(of) if isinstance(of, interpreter.tl.pointer_type) else known(of)

    interpreter._get_np_dtype = data_type


class _Bounded:
    """The interpreter's memory. Every address that a kernel reads or writes must lie in a tensor of its launch.

    spans: first byte and the one after the last, of each tensor as it was given: a view ends where its last entry does.
    """

    def __init__(self, memory: Any) -> None:
        self.memory, self.kernel = memory, ""
        self.spans: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check("reads", addresses, mask, np.dtype(dtype).itemsize)
        return self.memory.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, value: Any, mask: Any) -> Any:
        self._check("writes", addresses, mask, value.dtype.itemsize)
        return self.memory.store(addresses, value, mask)

    def _check(self, does: str, addresses: Any, mask: Any, size: int) -> None:
        asked = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)]
        if asked.size == 0:
            return
        first, last = int(asked.min()), int(asked.max()) + size
        if any(start <= first and last <= stop for start, stop in self.spans):
            return
        inside = np.zeros(asked.shape, dtype=bool)
        for start, stop in self.spans:
            inside |= (asked >= start) & (asked + size <= stop)
        if not inside.all():
            raise AssertionError(f"{self.kernel} {does} {int((~inside).sum())} of {asked.size} entries outside its tensors")


def _bound(interpreter: Any) -> None:
    memory = interpreter._interpreter = _Bounded(interpreter._interpreter)
    take = interpreter.GridExecutor._init_args_hst

    def taken(self: Any, args: Any, kwargs: Any) -> Any:
        found = take(self, args, kwargs)
        tensors = [interpreter._unwrap_tensor(one) for one in (*found[0], *found[1].values()) if hasattr(one, "data_ptr")]
        memory.kernel, memory.spans = self.fn.__name__, [_span(one) for one in tensors if one.numel()]
        return found

    interpreter.GridExecutor._init_args_hst = taken


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
