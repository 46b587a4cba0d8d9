"""The loop: every model, setting and sample of a task, each once; a run that stopped goes on where it was."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers

from kvpatch.errors import KVPatchError
from tools.bench.lines import where
from tools.training import tasks as synthetic
from tools.training.train import SHIPPED

from ..runs import cut_unfinished_line, read_lines
from .later import Later
from .mass import Mass
from .reasoning import Reasoning
from .table import Line, Table
from .task import Task, digest

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
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_unfinished_line(path)
    with path.open("a", encoding="utf-8") as file:
        for setting in task.settings(policies):
            missing = [sample for sample in samples if (setting.key, sample.digest) not in known]
            if not missing or (setting.key, whole) in known:
                continue
            head = {"model": name, "recipe": SHIPPED[name][0], "label": setting.row.label, "k": setting.k, "key": setting.key}
            try:
                for sample, values in zip(missing, task.run(model, setting, missing), strict=True):
                    line = head | {"sample": sample.name, "digest": sample.digest}
                    line |= {"metrics": {metric: round(float(value), 6) for metric, value in values.items()}}
                    file.write(json.dumps(line | {"versions": VERSIONS}) + "\n")
                    yield line
            except KVPatchError as error:  # with other samples it may run
                line = head | {"error": str(error), "digest": whole}
                file.write(json.dumps(line | {"versions": VERSIONS}) + "\n")
                yield line
            file.flush()


def measure_alone(task: str, name: str, folder: Path, count: int | None, policies: tuple[str, ...]) -> str:
    """Measure one task on one model in a process of its own, on one thread: the same digits on any number of cores."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
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
    # spawned: a forked torch may hang on locks of threads that are not there
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(measure_alone, task, model, folder, count, policies) for task, model in todo]
        for one in as_completed(waiting):
            print(one.result(), flush=True)


def collect(folder: Path) -> dict[str, Table]:
    """The lines of every task that has any."""
    found = {}
    for name, task in TASKS.items():
        if lines := [line for model in task.models for line in read_lines(find_lines(folder, name, model))]:
            found[name] = Table(lines)
    return found
