"""Which backend does which task of a call, and why: chosen by what the call asks, remembered for the report."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch

from ..errors import KVPatchError, suggest
from .protocol import TASKS, Case, Task

BACKENDS = {"torch": "torch_backend", "flash": "flash.flash_backend", "triton": "triton.triton_backend"}
PREFERRED: dict[Task, tuple[str, ...]] = {
    "prompt": ("flash", "torch"),
    "statistics": ("triton", "torch"),
    "decode": ("triton", "torch"),
    "ragged": ("triton", "flash", "torch"),
}
_LOG = logging.getLogger(__name__)
_said: set[str] = set()
_loaded: dict[str, Any] = {}


def backend(name: str) -> Any:
    """The module of that name, imported when it is first used."""
    if name not in _loaded:
        _loaded[name] = importlib.import_module(f".{BACKENDS[name]}", __package__)
    return _loaded[name]


def check_name(name: object) -> None:
    """Raise KVPatchError for a name that is no backend's."""
    if name != "auto" and not (isinstance(name, str) and name in BACKENDS):
        known = ("auto", *BACKENDS)
        raise KVPatchError(f"Unknown backend {name!r}.{suggest(str(name), known)} Known: {', '.join(map(repr, known))}.")


def check(name: str, case: Case) -> None:
    """Raise KVPatchError where the backend that was asked for can do nothing for the plain case of a model."""
    if name == "auto":
        return
    own = [task for task in TASKS if name in PREFERRED[task]]
    reasons = {task: backend(name).reason(task, case) for task in own}
    if all(reason is not None for reason in reasons.values()):
        raise KVPatchError(f"backend={name!r} cannot run here: {reasons[own[0]]}. Use backend='auto', which takes what can.")


class Choice:
    """The backends of one cache. `wanted`: "auto" takes the first that can, "torch" only torch, another name that one for
    its tasks wherever it can. ran: by task, which backend did it last, and why none that is preferred to it. coming: the same
    of steps that may be compiled."""

    def __init__(self, wanted: str = "auto") -> None:
        self.wanted = wanted
        self.known: dict[tuple[Task, Case], tuple[str, str]] = {}
        self.ran: dict[str, tuple[str, str]] = {}
        self.coming: dict[str, tuple[str, str]] = {}

    def of(self, task: Task, case: Case) -> str:
        """The backend's name; it is about to run."""
        if torch.compiler.is_compiling():
            return self.known[task, case][0] if (task, case) in self.known else "torch"  # which takes every case
        self.ran[task] = self._found(task, case)
        return self.ran[task][0]

    def record(self, task: Task, name: str, why: str) -> None:
        """What ran for a reason of the caller's."""
        if not torch.compiler.is_compiling():
            self.ran[task] = (name, why)

    def foresee(self, task: Task, case: Case) -> None:
        """Choose for what may come: a step under torch.compile cannot."""
        self.coming[task] = self._found(task, case)

    def _found(self, task: Task, case: Case) -> tuple[str, str]:
        if (task, case) not in self.known:
            self.known[task, case] = self._choose(task, case)
        return self.known[task, case]

    def _choose(self, task: Task, case: Case) -> tuple[str, str]:
        if self.wanted == "torch":
            return "torch", "asked for"
        passed = []
        for name in PREFERRED[task]:
            if name == "triton" and self.wanted != name and case.device == "cpu":
                passed.append("triton: kernels run on a GPU")  # in its interpreter only where that is asked for
                continue
            reason = backend(name).reason(task, case)
            if reason is None:
                kernel = [backend(name).which(case)] if name == "flash" and task == "prompt" else []
                return name, "; ".join(kernel + passed)
            passed.append(f"{name}: {reason}")
            if name == self.wanted and passed[-1] not in _said:
                _said.add(passed[-1])
                _LOG.warning("backend=%r leaves %s to another: %s.", name, task, reason)
        raise AssertionError("torch takes every case")
