"""Which policy and budget for your model and your text? The three papers' experiments, one command each.

    python -m tools.evaluation                                      the tasks
    python -m tools.evaluation needle                               on the shipped models, in minutes
    python -m tools.evaluation needle --policies window,snapkv --budgets 0.1,0.3 --samples 100 --seeds 2
    python -m tools.evaluation summarize --model my/model --data prompts.jsonl --policies h2o,roco --budgets 0.5
    python -m tools.evaluation longbench --model my/model --data LongBench/data -o sets=qasper,trec
    python -m tools.evaluation claims                               what the papers claim, on the shipped models: eleven minutes

DIR/TASK.jsonl gets a line per sample and setting as they come: the same command again goes on where it stopped. Then
DIR/TASK.md has the means with their intervals, DIR/TASK.png a picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from kvpatch import get_policy
from kvpatch.cli.commands import parse_options, short_errors
from kvpatch.errors import KVPatchError, suggest
from kvpatch.policies.budgets import check_k, parse_k
from tools.evaluation import plots, runs, summary
from tools.evaluation.table import Table
from tools.evaluation.task import Request, Task
from tools.evaluation.tasks import TASKS, get_task

CLAIMS = "claims"
"""What is no task: it runs those that the papers' claims need."""


def listed(text: str | None) -> tuple[str, ...] | None:
    """A comma-separated option."""
    if text is None:
        return None
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise KVPatchError(f"{text!r} names nothing: give one or more, with commas between them.")
    return found


def checked(task: Task, request: Request) -> Request:
    """Raise KVPatchError for what the task cannot take, before a model is loaded."""
    for name in request.policies or ():
        get_policy(name)
    for k in request.budgets or ():
        check_k(k, f"--budgets={k!r}")
    for name in request.options:
        if name not in task.options:
            known = ", ".join(f"{name}={value}" for name, value in task.options.items()) or "none"
            raise KVPatchError(f"Task {task.name} has no option {name!r}. It has: {known}.")
    return request


def evaluate(task: Task, request: Request, baseline: str | None, fresh: bool = False) -> Table:
    """Run what is missing, then write the summary and the picture. baseline: a setting's name; None is `random`.

    Raises:
        KVPatchError: no setting has that name; what was measured stays.
    """
    book = runs.book_of(task, request.out, fresh)
    try:
        with runs.bars() as progress:
            runs.run(task, request, book, progress)
    finally:
        book.close()
    table = Table(book.lines)
    if baseline is not None and baseline not in table.names:
        known = ", ".join(table.names)
        raise KVPatchError(f"--baseline {baseline} is none of the settings.{suggest(baseline, table.names)} They are: {known}.")
    (request.out / f"{task.name}.md").write_text(summary.report(table, task, baseline or "random"), encoding="utf-8")
    plots.curves(table, task, request.out / f"{task.name}.png")
    task.pictures(table, request.out)
    return table


def main(
    task: Annotated[str | None, typer.Argument(help="one of the tasks; without one they are listed")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "--models", help="shipped names, folders or hub ids, with commas")
    ] = None,
    policies: Annotated[str | None, typer.Option(help="names of `kvpatch policies`, with commas; full is always there")] = None,
    budgets: Annotated[str | None, typer.Option(help="such as 0.1,0.5 (shares), 256 (tokens), 1GiB")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="of each model and seed; else the task's own number")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="how many draws of the samples and of the policies' noise")] = 1,
    data: Annotated[str | None, typer.Option(help="your own prompts and references: FILE.jsonl, or what the task says")] = None,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="the task's own, as in -o window=512")] = None,
    baseline: Annotated[str | None, typer.Option(help="what the others are compared with besides full; else random")] = None,
    batch: Annotated[int, typer.Option(min=1, help="rows at a time")] = 32,
    dtype: Annotated[str, typer.Option(help="of models that are not shipped")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    threads: Annotated[int | None, typer.Option(help="of the CPU; 1 gives the same figures on any number of cores")] = None,
    out: Annotated[Path, typer.Option(help="where lines, summary and picture go")] = Path("out/evaluate"),
    fresh: Annotated[bool, typer.Option("--fresh", help="forget what the folder has of this task")] = False,
) -> None:
    """Measure a task under policies and budgets."""
    with short_errors():
        if task is None:
            for name, one in TASKS.items():
                print(f"{name:13} {one.about} {one.source}".rstrip())
            print(f"{CLAIMS:13} The papers' claims, each with a verdict of the shipped models; two processes.")
            return
        if task == CLAIMS:
            from tools.evaluation.results import claims  # which imports every task's page

            print(claims(out / CLAIMS, listed(model), samples or 8, fresh=fresh))
            return
        chosen, given = get_task(task), listed(budgets)
        if threads is not None:
            torch.set_num_threads(threads)
        request = Request(
            models=listed(model),
            policies=listed(policies),
            budgets=None if given is None else tuple(parse_k(k, "--budgets") for k in given),
            count=samples,
            seeds=seeds,
            batch=batch,
            data=data,
            options=parse_options(option),
            dtype=dtype,
            device=device,
            out=out,
        )
        evaluate(chosen, checked(chosen, request), baseline, fresh)
    print((out / f"{task}.md").read_text(encoding="utf-8"))
    print(f"{out / task}.jsonl, .md, .png")


if __name__ == "__main__":
    typer.run(main)
