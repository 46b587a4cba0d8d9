"""Faults put into the library: an exception at the n-th line that it runs, and all that a cache holds, to be compared.

A line of the library is where Python may deliver a signal, or where a tensor may fail to be allocated; what lies between two
lines is one step for these tests. What a cache only computes from the rest, to have it at hand, is left out of the comparison:
a continuation shows whether it is right.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor

import kvpatch
from kvpatch import KVPatchError

HERE = str(Path(kvpatch.__file__).parent)
AT_HAND = {
    "now", "choice", "table", "make_table", "limits_of", "deck", "deck_due", "ahead", "free_at", "heads_at", "geometry",
    "output_rows", "marks", "changes", "_places", "_sequences", "policy", "policies", "budget", "parallel", "span", "traced",
    "recording",
}  # fmt: skip


class Out(Exception):
    """What is raised where nobody expects it."""


def _trace(each, names):
    """A trace function that calls `each` with the frame at every line of the library, or of the functions of these names."""

    def local(frame, event, arg):
        if event == "line":
            each(frame)
        return local

    def call(frame, event, arg):
        code = frame.f_code
        return local if code.co_filename.startswith(HERE) and (names is None or code.co_name in names) else None

    return call


def lines(run, names=None):
    """How many lines of the library `run` runs."""
    count = 0

    def each(frame):
        nonlocal count
        count += 1

    before = sys.gettrace()
    sys.settrace(_trace(each, names))
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def interrupt(run, n, error=KeyboardInterrupt, names=None):
    """Run with `error` raised before the n-th line (from 0); where that was, and whether it came out. Others come out."""
    count, where = 0, None

    def each(frame):
        nonlocal count, where
        count += 1
        if count == n + 1:
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            raise error("put here by a test")

    before = sys.gettrace()
    sys.settrace(_trace(each, names))
    try:
        run()
    except error:
        return where, True
    finally:
        sys.settrace(before)
    return where, False


def spread(total, most):
    """At most so many of the numbers below `total`, the ends among them."""
    if total <= most:
        return list(range(total))
    return sorted({round(i * (total - 1) / (most - 1)) for i in range(most)})


# ---- all that a cache holds ----


def contents(thing, path=""):
    """Flat names and values (tensors cloned) of all state of a cache or of a part of it."""
    if isinstance(thing, Tensor):
        return {path: thing.detach().clone()}
    if isinstance(thing, dict):
        items = thing.items()
    elif isinstance(thing, list | tuple) or type(thing).__name__ == "deque":
        items = [("len", len(thing)), *enumerate(thing)]
    elif dataclasses.is_dataclass(thing) or type(thing).__module__.startswith("kvpatch"):
        items = vars(thing).items()
    else:
        return {path: thing}
    return {name: value for key, part in items if key not in AT_HAND for name, value in contents(part, f"{path}.{key}").items()}


def differences(one, other):
    """Names whose values are not bit for bit the same."""
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if name not in one or name not in other or not _same(one[name], other[name])]


def _same(a, b):
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    return type(a) is type(b) and a == b


def refusal(use):
    """The words with which `use` is refused, or None."""
    try:
        use()
    except KVPatchError as error:
        return str(error)
    return None
