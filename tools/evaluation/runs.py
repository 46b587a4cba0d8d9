"""The loop: every model, seed, setting and sample of a task, each once; a run that stopped goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvpatch import get_policy
from kvpatch.cli.loading import load_model, load_tokenizer
from kvpatch.errors import KVPatchError
from kvpatch.policies.budgets import share
from tools.training import tasks as synthetic
from tools.training.train import SHIPPED

from .lines import Book, Line, versions
from .task import WALKS, Request, Sample, Setting, Subject, Task, digest


def load(name: str, request: Request) -> Subject:
    """A shipped model by its name, or any other by folder or hub name.

    Raises:
        KVPatchError: there is no such model. A missing tokenizer is None here, for the tasks that need none.
    """
    shipped = name in (folders := synthetic.shipped())
    where = str(folders[name]) if shipped else name
    model = load_model(where, "float32" if shipped else request.dtype, request.device)
    try:
        tokenizer = load_tokenizer(where)
    except KVPatchError:
        tokenizer = None
    recipe = SHIPPED[name][0] if shipped else name
    words = tokenizer is not None and synthetic.WORDS[synthetic.QUESTION] in tokenizer.get_vocab()
    return Subject(name, model, tokenizer, recipe, words and recipe != WALKS)


def run(
    task: Task,
    request: Request,
    book: Book,
    progress: Progress | None = None,
    settings: list[Setting] | None = None,
    subject: Subject | None = None,
) -> None:
    """Measure what is not in the book yet. settings, subject: in place of the task's own and of the models to be loaded."""
    asked, loaded = settings, subject
    for name in request.models or task.models:
        subject = loaded or load(name, request)
        for seed in range(request.seeds):
            samples = task.samples(subject, request, seed)
            settings = asked or task.settings(request, subject)
            bar = None if progress is None else progress.add_task(f"{task.name} {name}", total=len(settings) * len(samples))
            for setting in settings:
                for _ in _cell(task, subject, setting, samples, request, seed, book):
                    if progress is not None and bar is not None:
                        progress.update(bar, advance=1, description=f"{task.name} {name} {setting.name} {setting.k}")


def _cell(
    task: Task,
    subject: Subject,
    setting: Setting,
    samples: list[Sample],
    request: Request,
    seed: int,
    book: Book,
) -> Iterator[Line]:
    """The lines of one setting: those that are in the book, then those that are missing."""
    whole = digest(*(sample.digest for sample in samples))
    failed = book.find(subject.name, setting.key, seed, None)
    if failed is not None and failed.get("digest") == whole:  # with other samples it may run
        yield failed
        return
    known = {s.name: book.find(subject.name, setting.key, seed, s.name, s.digest) for s in samples}
    yield from (line for line in known.values() if line is not None)
    missing = [sample for sample in samples if known[sample.name] is None]
    head = {
        "task": task.name, "model": subject.name, "recipe": subject.recipe, "setting": setting.key, "name": setting.name,
        "policy": setting.policy, "k": setting.k, "options": setting.options, "seed": seed,
    }  # fmt: skip
    tail = {
        "device": device_name(subject.model.device),
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "versions": versions(),
    }
    if not missing:
        return
    try:
        measured = task.run(subject, setting, missing, request, seed)
        for sample, values in zip(missing, measured, strict=True):
            line = head | {"sample": sample.name, "digest": sample.digest, "n": sample.n, "group": sample.group}
            if "text" in values:
                line["text"] = values.pop("text")
            line["metrics"] = {name: round(float(value), 6) for name, value in values.items()}
            note = clamped(setting, sample.n)
            book.add(line | ({"note": note} if note else {}) | tail)
            yield line
    except KVPatchError as error:
        line = head | {"error": str(error), "digest": whole} | tail
        book.add(line)
        yield line


def clamped(setting: Setting, n: int) -> str:
    """What of a policy's protection did not fit a budget, in words; "" where all of it did."""
    if setting.policy == "full" or not isinstance(setting.k, int | float):
        return ""
    own = {
        name: value
        for name, value in setting.options.items()
        if name not in ("bits", "block", "positions", "backend", "schedule")
    }
    policy = get_policy(setting.policy).with_options(setting.options.get("schedule"), **own)
    budget = max(1, share(setting.k, n))
    if not policy.evicts or budget >= n:
        return ""
    tail = policy.needs.protects
    sizes = policy.scope.sinks, max(share(policy.scope.recent, budget), tail), share(policy.scope.deviation, budget)
    if sum(sizes) < budget:
        return ""
    return f"protects {sum(sizes)} tokens, cut down to a budget of {budget}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def bars() -> Progress:
    """Progress bars for a terminal, on standard error."""
    from rich.console import Console

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def book_of(task: Task, out: Path, fresh: bool = False) -> Book:
    path = out / f"{task.name}.jsonl"
    if fresh:
        path.unlink(missing_ok=True)
    return Book(path)
