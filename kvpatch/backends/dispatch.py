"""Dispatch: chooses a backend for each task of a call and records the choice for the report."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import KVPatchError, match_name, suggest
from . import refusals
from .protocol import TASKS, Case, Task

BACKENDS = {"torch": "torch_backend", "flash": "flash.flash_backend", "triton": "triton.triton_backend"}
PREFERRED: dict[Task, tuple[str, ...]] = {
    "prompt": ("flash", "triton", "torch"),
    "statistics": ("triton", "torch"),
    "replay": ("triton", "torch"),
    "decode": ("triton", "torch"),
    "ragged": ("triton", "flash", "torch"),
}
_LOG = logging.getLogger(__name__)
_said: set[str] = set()
_loaded: dict[str, Any] = {}
T = TypeVar("T")


def backend(name: str) -> Any:
    """Return the module of a backend ("torch", "flash" or "triton"), imported on first use and kept in `_loaded`."""
    if name not in _loaded:
        _loaded[name] = importlib.import_module(f".{BACKENDS[name]}", __package__)
    return _loaded[name]


def check_name(name: object) -> str:
    """Return "auto" or the backend's name in its own spelling. `patched` calls it for its argument `backend`.

    Raises:
        KVPatchError: there is no such backend.
    """
    names = ("auto", *BACKENDS)
    match = match_name(name, names)
    if match is None:
        raise KVPatchError(f"Unknown backend {name!r}.{suggest(name, names)} Known: {', '.join(map(repr, names))}.")
    return match


def check(name: str, case: Case) -> None:
    """Raise KVPatchError if backend=`name` can do none of its tasks for such layers. `settings_of` calls it at patched().

    A task is a kind of attention, such as "prompt" or "decode". case: the layers' device, dtype, head size and the like.
    """
    if name == "auto":
        return
    tasks = [task for task in TASKS if name in PREFERRED[task]]
    reasons = {task: backend(name).reason(task, case) for task in tasks}
    if all(reason is not None for reason in reasons.values()):
        raise KVPatchError(f"backend={name!r} cannot run here: {reasons[tasks[0]]}. Use backend='auto', which takes what can.")


class Choice:
    """The choice of backends for one cache. A Case is the kind of call: device, dtype, head size and the like.

    Attributes:
        wanted: "auto" takes the first backend that can do a task, "torch" only torch, another name that backend where it can.
        choices: those already made, as (name, reasons against the preferred ones) by task and case.
        ran_last: by task, the backend and the reasons against the preferred ones.
        may_run: the same for steps that may be compiled.
    """

    def __init__(self, wanted: str = "auto") -> None:
        """Begin without any choice, when a cache or a pass of a replay is made. wanted: the `backend` argument of `patched`."""
        self.wanted = wanted
        # each holds (backend, why not the preferred ones): of all calls so far, of each task's last call, of steps to compile
        self.choices: dict[tuple[Task, Case], tuple[str, str]] = {}
        self.ran_last: dict[str, tuple[str, str]] = {}
        self.may_run: dict[str, tuple[str, str]] = {}

    def of(self, task: Task, case: Case) -> str:
        """Return the name of the backend for a task, and record it in `ran_last` for the report.

        `attend_to` and `choose_backend` call it just before the task runs. A new choice is kept in `choices`. While
        torch.compile traces, only a choice made before is used, and nothing is recorded.
        """
        if torch.compiler.is_compiling():
            return self.choices[task, case][0] if (task, case) in self.choices else "torch"  # torch takes every case
        self.ran_last[task] = self._find_choice(task, case)
        return self.ran_last[task][0]

    def instead(self, task: Task, case: Case, name: str, why: str) -> str:
        """Return another backend for a call that its chosen backend, `name`, has refused; note the reason, `why`.

        `attend_to` calls it where flash was chosen for a prompt and cannot serve it. Other calls keep their backend.
        """
        self.ran_last[task] = self._choose_backend(task, case, {name: why})
        return self.ran_last[task][0]

    def record(self, task: Task, name: str, why: str) -> None:
        """Write to `ran_last`, for the report, that backend `name` runs a task by the caller's own choice.

        `attend_to` and `_raise_scores` call it. why: the reason, or the name of flash's kernel. While torch.compile traces,
        nothing is written.
        """
        if not torch.compiler.is_compiling():
            self.ran_last[task] = (name, why)

    def attempt(
        self, task: Task, case: Case, run: Callable[[], T], written: tuple[Tensor, ...] = (), name: str | None = None
    ) -> T | None:
        """Run the kernel chosen for a task and return its result; None if its first launch fails: the caller then uses torch.

        `attend_to`, `_run_kernels` and others call it for each task that a kernel takes. After a failure `ran_last` names the
        backend that is used from now on. run: calls the kernel. written: tensors that the kernel changes in place; a failure
        leaves them as before. name: the backend, if `instead` chose it for this call alone.
        """
        name = name or self.choices[task, case][0]
        if torch.compiler.is_compiling():
            return run()
        result = refusals.attempt(f"{name} {task}", case, run, backend(name).advice, written)
        if result is None and name == self.choices[task, case][0]:  # choose anew: the failed kernel is now refused
            del self.choices[task, case]
            self.of(task, case)
        elif result is None:  # `instead` chose it: other calls keep their backend
            self.record(task, "torch", f"{self.ran_last[task][1]}; {name}: {refusals.known[f'{name} {task}', case]}")
        return result

    def foresee(self, task: Task, case: Case) -> None:
        """Choose a task's backend before torch.compile traces a decode step, since no choice can be made during the trace.

        The choice is kept in `choices`, where `of` finds it, and in `may_run`, for the report.
        """
        self.may_run[task] = self._find_choice(task, case)

    def _find_choice(self, task: Task, case: Case) -> tuple[str, str]:
        """Return (backend, why not the preferred ones), chosen when a task first meets a case, and kept in `choices`."""
        if (task, case) not in self.choices:
            self.choices[task, case] = self._choose_backend(task, case)
        return self.choices[task, case]

    def _choose_backend(self, task: Task, case: Case, refused: Mapping[str, str] = MappingProxyType({})) -> tuple[str, str]:
        """Return the first backend that takes a case, and why those tried before it do not. The wanted one is tried first.

        `_find_choice` calls it for each new (task, case), and `instead` where a backend refuses at run time. Warns once if the
        wanted one cannot. refused: backends that have refused this call, with reasons. `refusals.known` has the kernels that
        failed earlier in this process.
        """
        if self.wanted == "torch":
            return "torch", "asked for"
        skipped = []
        for name in sorted(PREFERRED[task], key=lambda name: name != self.wanted):  # the wanted one first, then by preference
            if name in refused:
                skipped.append(f"{name}: {refused[name]}")
                continue
            if name == "triton" and self.wanted != name and case.device == "cpu":
                skipped.append("triton: kernels run on a GPU")  # the interpreter runs only on request
                continue
            reason = refusals.known.get((f"{name} {task}", case)) or backend(name).reason(task, case)
            if reason is None:
                return name, "; ".join(skipped)
            skipped.append(f"{name}: {reason}")
            if name == self.wanted and skipped[-1] not in _said:
                _said.add(skipped[-1])
                _LOG.warning("[kvpatch] backend=%r leaves %s to another: %s.", name, task, reason)
        raise AssertionError("torch takes every case")
