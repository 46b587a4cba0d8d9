"""The table of tasks."""

from __future__ import annotations

from kvpatch.errors import KVPatchError, suggest

from .ablate import Ablate
from .bits import Bits
from .jaccard import Jaccard
from .later import Later
from .mass import Mass
from .needle import Needle
from .perturb import Perturbation
from .reasoning import Reasoning
from .recall import Recall
from .robustness import Robustness
from .sparsity import Sparsity
from .task import Task

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        Needle, Recall, Later, Reasoning, Jaccard, Perturbation, Sparsity, Robustness, Ablate, Bits, Mass,
    )
}  # fmt: skip


def get_task(name: str) -> Task:
    """Raises KVPatchError for a name that is no task's."""
    if name not in TASKS:
        raise KVPatchError(f"Unknown task {name!r}.{suggest(name, TASKS)} Known: {', '.join(TASKS)}.")
    return TASKS[name]()
