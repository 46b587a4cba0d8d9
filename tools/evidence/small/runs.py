"""The loop: every model, setting and sample of a task, each once; a run that stopped goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvpatch.errors import KVPatchError
from tools.bench.lines import where
from tools.training import tasks as synthetic
from tools.training.train import SHIPPED

from ..runs import Line, append, read_lines, run_apart
from ..samples import digest
from ..settings import Setting
from .later import Later
from .mass import Mass
from .reasoning import Reasoning
from .table import Table
from .task import Task

TASKS: dict[str, Task] = {task.name: task for task in (Later(), Mass(), Reasoning())}
VERSIONS = where()["versions"]


def find_lines(folder: Path, task: str, model: str) -> Path:
    """The file of a task's lines of one model."""
    return folder / model / f"{task}.jsonl"


def measure(
    task: Task, name: str, model: Any, path: Path, count: int | None = None, policies: tuple[str, ...] = ()
) -> Iterator[Line]:
    """Measure what the file lacks, setting by setting, and append it."""
    known = {(line["key"], line["digest"]) for line in read_lines(path)}
    samples = task.samples(count or task.count)
    whole = digest(*(sample.digest for sample in samples))

    def measure_setting(setting: Setting) -> Iterator[Line]:
        missing = [sample for sample in samples if (setting.key, sample.digest) not in known]
        if not missing or (setting.key, whole) in known:
            return
        head = {"model": name, "recipe": SHIPPED[name][0], "label": setting.row.label, "k": setting.k, "key": setting.key}
        try:
            for sample, values in zip(missing, task.run(model, setting, missing), strict=True):
                metrics = {metric: round(float(value), 6) for metric, value in values.items()}
                yield head | {"sample": sample.name, "digest": sample.digest, "metrics": metrics}
        except KVPatchError as error:  # with other samples it may run
            yield head | {"error": str(error), "digest": whole}

    lines = (line for setting in task.settings(policies) for line in measure_setting(setting))
    return append(path, ([line | {"versions": VERSIONS}] for line in lines))


def measure_alone(task: str, name: str, folder: Path, count: int | None, policies: tuple[str, ...]) -> str:
    """Measure one task on one model."""
    model, _ = synthetic.load(name)
    with torch.no_grad():
        new = sum(1 for _ in measure(TASKS[task], name, model, find_lines(folder, task, name), count, policies))
    return f"{task} {name}: {new} new lines"


def run(
    names: Sequence[str],
    folder: Path,
    models: Sequence[str] = (),
    count: int | None = None,
    policies: tuple[str, ...] = (),
    jobs: int = 2,
) -> None:
    """Measure tasks on their models, or on some of them, `jobs` at a time."""
    todo = [(task, model) for task in names for model in TASKS[task].models if not models or model in models]
    run_apart(measure_alone, [(task, model, folder, count, policies) for task, model in todo], jobs)


def collect(folder: Path) -> dict[str, Table]:
    """The lines of every task that has any."""
    found = {}
    for name, task in TASKS.items():
        if lines := [line for model in task.models for line in read_lines(find_lines(folder, name, model))]:
            found[name] = Table(lines)
    return found
