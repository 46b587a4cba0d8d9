"""Measure policies on a pretrained language model, and write docs/results.md.

python -m tools.evidence                                       the tasks
python -m tools.evidence run document                          on .models/smollm2 (`make real`)
python -m tools.evidence run asked --model my/model --policies snapkv,kvzip --budgets 0.2
python -m tools.evidence page                                  the tables from the lines that are there
python -m tools.evidence small later --models llama-0          what small models show, and docs/small-models.md with --write
python -m tools.evidence quotas --samples 12                   what quotas do for the worst instruction
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from ..real_model import VARIABLE
from . import agents as agents_runs
from . import answers as answers_runs
from . import drafts as drafts_runs
from . import quotas as quotas_runs
from .choices import list_rows
from .offloaded import count_offloaded
from .page import write_section
from .report import write_page
from .runs import run_task
from .settings import LABELS, MIDDLE, MOST, ROWS, Cells
from .small import page as small_page
from .small import runs as small_runs
from .tasks import TASKS

LINES = Path("benchmarks/evidence")
app = typer.Typer(add_completion=False, invoke_without_command=True)


@app.callback()
def list_tasks(context: typer.Context) -> None:
    """List the tasks and the rows."""
    if context.invoked_subcommand is None:
        for task in TASKS.values():
            print(f"{task.name:14} {task.about}")
        print("policies:", ", ".join(ROWS))


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(";" if ";" in text else ",") if part.strip()]


def _load(model: str, threads: int) -> tuple[Any, Any]:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@app.command()
def run(
    tasks: Annotated[list[str], typer.Argument(help="names of tasks, or all")],
    model: Annotated[str, typer.Option(help="folder or hub name", envvar=VARIABLE)] = ".models/smollm2",
    samples: Annotated[int | None, typer.Option(min=2, help="else those of the page")] = None,
    policies: Annotated[str, typer.Option(help="labels, else those of the page; separated by ; where one has a comma")] = "",
    choices: Annotated[bool, typer.Option("--choices", help="single options of policies, in place of policies")] = False,
    budgets: Annotated[str, typer.Option(help="shares of the prompt, comma-separated, else those of the page")] = "",
    out: Annotated[Path, typer.Option(help="folder of the lines; what it has is not measured again")] = LINES,
    jobs: Annotated[int, typer.Option(min=1, help="tasks at a time, a process and a thread each")] = 1,
) -> None:
    """Measure tasks and append lines."""
    names = list(TASKS) if tasks == ["all"] else tasks
    labels, shares = _split(policies), [float(part) for part in _split(budgets)]
    known = list_rows() if choices else ROWS
    for name in names:
        if name not in TASKS:
            raise typer.BadParameter(f"{name!r} is not a task: {', '.join(TASKS)}")
    for label in labels:
        if label not in known:
            raise typer.BadParameter(f"{label!r} is not a row: {'; '.join(known)}")
    cells: list[Cells] = []
    if samples or labels or choices or shares:
        rows = tuple(known[label] for label in labels or (known if choices else LABELS))
        cells = [Cells(k, samples or MOST, rows) for k in shares or [MIDDLE]]
    # spawned: a forked torch may hang on locks of threads that are not there
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(_run_alone, model, name, cells, out) for name in names]
        for one in as_completed(waiting):
            print(one.result(), flush=True)


def _run_alone(model: str, name: str, cells: list[Cells], out: Path) -> str:
    """Measure a task in a process of its own, on one thread: the same digits on any number of cores."""
    start = time.monotonic()
    tokenizer, loaded = _load(model, 1)
    new = run_task(loaded, tokenizer, name, cells, out)
    return f"{name}: {new} new lines in {time.monotonic() - start:.0f} s"


@app.command()
def agents(
    model: Annotated[str, typer.Option(help="folder or hub name", envvar=VARIABLE)] = ".models/smollm2",
    samples: Annotated[int, typer.Option(min=2)] = 60,
    out: Annotated[Path, typer.Option(help="folder of the lines")] = LINES,
) -> None:
    """Measure what dropping a tool result costs, and print the table of docs/guides/agents.md."""
    tokenizer, loaded = _load(model, 1)
    for line in agents_runs.run(loaded, tokenizer, samples, out / "agents.jsonl"):
        print(line["sample"], line["ways"]["forgotten"], flush=True)
    print(agents_runs.write_table(out / "agents.jsonl"))


@app.command()
def answers(
    model: Annotated[str, typer.Option(help="folder or hub name", envvar=VARIABLE)] = ".models/smollm2",
    samples: Annotated[int, typer.Option(min=2, help="texts; as many as make whole batches")] = 24,
    out: Annotated[Path, typer.Option(help="folder of the lines")] = LINES,
) -> None:
    """Measure answers of 512 tokens under a budget for the whole sequence, and print their table."""
    tokenizer, loaded = _load(model, 1)
    for line in answers_runs.run(loaded, tokenizer, samples, out / "answers.jsonl"):
        print(line, flush=True)
    print(answers_runs.write_table(out / "answers.jsonl"))


@app.command()
def drafts(
    model: Annotated[str, typer.Option(help="folder or hub name", envvar=VARIABLE)] = ".models/smollm2",
    samples: Annotated[int, typer.Option(min=1, help="texts of each kind")] = 4,
    out: Annotated[Path, typer.Option(help="folder of the lines")] = LINES,
) -> None:
    """Measure what drafts of budgeted caches come to, and print the table of docs/guides/lossless.md."""
    tokenizer, loaded = _load(model, 1)
    for line in drafts_runs.run(loaded, tokenizer, samples, out / "drafts.jsonl"):
        print(line, flush=True)
    print(drafts_runs.write_table(out / "drafts.jsonl"))
    _, _, ids_1N = drafts_runs.make_texts(tokenizer, 1)[0]
    print("offloaded cache, full caches a token: read {:.2f}, written {:.2f}".format(*count_offloaded(loaded, ids_1N, 4)))
    drafts_runs.draw(out / "drafts.jsonl", Path("docs/results/lossless.png"))


@app.command()
def quotas(
    model: Annotated[str, typer.Option(help="folder or hub name", envvar=VARIABLE)] = ".models/smollm2",
    samples: Annotated[int, typer.Option(min=2)] = 12,
    out: Annotated[Path, typer.Option(help="folder of the lines")] = LINES,
) -> None:
    """Measure what quotas and a protected system message do for the worst instruction, and print the table."""
    tokenizer, loaded = _load(model, 1)
    for line in quotas_runs.run(loaded, tokenizer, samples, out / "quotas.jsonl"):
        print(line["sample"], line["policy"], line["way"], line["worst"], flush=True)
    print(quotas_runs.write_table(out / "quotas.jsonl"))


@app.command()
def page(
    lines: Annotated[Path, typer.Option(help="folder of the lines")] = LINES,
    write: Annotated[
        bool, typer.Option("--write", help="docs/results.md and its picture, instead of printing the tables")
    ] = False,
) -> None:
    """Print the tables of the lines that are there, or write the page."""
    if write:
        write_page(lines, Path("docs"))
    else:
        print(write_section(lines))


@app.command()
def small(
    tasks: Annotated[list[str] | None, typer.Argument(help="names of tasks, or all; none: what is there is shown")] = None,
    models: Annotated[str, typer.Option(help="shipped models; else the task's own")] = "",
    policies: Annotated[str, typer.Option(help="of the task; separated by ; where one has a comma")] = "",
    samples: Annotated[int | None, typer.Option(min=1, help="of each model; else the task's own number")] = None,
    out: Annotated[Path, typer.Option(help="folder of the lines; what it has is not measured again")] = Path("out/small"),
    jobs: Annotated[int, typer.Option(min=1, help="processes at a time")] = 2,
    write: Annotated[bool, typer.Option("--write", help="docs/small-models.md, instead of printing its sections")] = False,
) -> None:
    """Measure mechanisms on the models that this repository trained."""
    known = list(small_runs.TASKS)
    names = known if tasks == ["all"] else tasks or []
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not a task: {', '.join(known)}")
    small_runs.run(names, out, _split(models), samples, tuple(_split(policies)), jobs)
    found = small_runs.collect(out)
    if write:
        small_page.write_page(found, Path("docs"))
    else:
        print(small_page.write_sections(found, names or known))


if __name__ == "__main__":
    app()
