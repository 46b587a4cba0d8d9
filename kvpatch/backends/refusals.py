"""Kernels that failed when they were first called: remembered for the process, so that another serves from then on.

A kernel is compiled and loaded at its first launch, so only then is it known to run: a compiler or a writable directory may be
missing, a GPU may be too new, or have too little shared memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .protocol import Case

_LOG = logging.getLogger(__name__)
FATAL = (torch.OutOfMemoryError, torch.AcceleratorError)  # errors that every kernel would raise
known: dict[tuple[str, Case | None], str] = {}  # by kernel and case; None: a case of its own
_ran: set[tuple[str, Case]] = set()
T = TypeVar("T")


def remember(kernel: str, case: Case | None, error: Exception, then: str) -> None:
    """Write to `known` that a kernel refused a case, and log a warning: `Choice` and flash's `reason` then pass it over.

    case: None for flash's decode steps over ragged heads. then: end of the warning, what happens instead, and what to do.
    """
    known[kernel, case] = " ".join(str(error).split())
    _LOG.warning("[kvpatch] %s refused (%s); %s", kernel, known[kernel, case], then)


def attempt(
    kernel: str, case: Case, run: Callable[[], T], advice: Callable[[Exception], str | None], written: tuple[Tensor, ...] = ()
) -> T | None:
    """Run a kernel and return its result; if its first launch for this case fails, log and remember it, and return None.

    `Choice.attempt` calls it. Later launches are not guarded: their errors are raised. So are FATAL errors, such as a lack of
    memory, which every kernel would raise.

    Args:
        kernel: name.
        case: kind of call, see protocol.Case.
        run: calls the kernel.
        advice: returns what the user can do about an error, or None for an error of another kind, which is raised.
        written: tensors that the kernel changes in place. They are copied for the first launch, and restored if it fails.
    """
    if (kernel, case) in _ran:
        return run()
    # the first launch compiles the kernel: it may fail, and is undone then
    before = [tensor.clone() for tensor in written]
    try:
        result = run()
    except FATAL:
        raise
    except Exception as error:
        hint = advice(error)
        if hint is None:
            raise
        for tensor, old in zip(written, before, strict=True):
            tensor.copy_(old)
        remember(kernel, case, error, f"torch serves instead, more slowly. {hint}".rstrip())
        return None
    _ran.add((kernel, case))
    return result
