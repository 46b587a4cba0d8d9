"""Measure policies on a pretrained language model, and write docs/results.md.

python -m tools.evidence                                       the tasks
python -m tools.evidence run document                          on .models/smollm2 (`make real`)
python -m tools.evidence run asked --model my/model --out out/mine --policies snapkv,kvzip --budgets 0.2
python -m tools.evidence page                                  the tables from the lines that are there
python -m tools.evidence small later --models llama-0          what small models show, and docs/small-models.md with --write
python -m tools.evidence quotas --samples 12                   what quotas do for the worst instruction
"""

from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from ..real_model import VARIABLE
from . import agents, answers, drafts, quotas
from .choices import list_rows
from .page import write_section
from .report import write_page
from .runs import append, load_model, read_lines, run_apart, run_task
from .settings import LABELS, MIDDLE, MOST, ROWS, Cells
from .small import page as small_page
from .small import runs as small_runs
from .tasks import TASKS

LINES = Path("benchmarks/evidence")
Model = Annotated[str, typer.Option(help="folder or hub name", envvar=VARIABLE)]
MODEL = ".models/smollm2"
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


def _refuse_unknown(names: list[str], known: Collection[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not a {what}: {'; '.join(known)}")


@app.command()
def run(
    tasks: Annotated[list[str], typer.Argument(help="names of tasks, or all")],
    model: Model = MODEL,
    samples: Annotated[int | None, typer.Option(min=2, help="else those of the page")] = None,
    policies: Annotated[str, typer.Option(help="labels, else those of the page; separated by ; where one has a comma")] = "",
    choices: Annotated[bool, typer.Option("--choices", help="single options of policies, in place of policies")] = False,
    budgets: Annotated[str, typer.Option(help="shares of the prompt, comma-separated, else those of the page")] = "",
    out: Annotated[Path, typer.Option(help="folder of the lines; what it has is not measured again")] = LINES,
    jobs: Annotated[int, typer.Option(min=1, help="tasks at a time, a process and a thread each")] = 1,
) -> None:
    """Measure tasks and append lines."""
    if out == LINES and Path(model).resolve() != Path(MODEL).resolve():
        raise typer.BadParameter(f"lines name no model, and those in {LINES} are of {MODEL}: give --out FOLDER")
    names = list(TASKS) if tasks == ["all"] else tasks
    labels, shares = _split(policies), [float(part) for part in _split(budgets)]
    known = list_rows() if choices else ROWS
    _refuse_unknown(names, TASKS, "task")
    _refuse_unknown(labels, known, "row")
    rows = tuple(known[label] for label in labels or (known if choices else LABELS))
    cells = [Cells(k, samples or MOST, rows) for k in shares or [MIDDLE]] if samples or labels or choices or shares else []
    run_apart(run_task, [(model, name, cells, out) for name in names], jobs)


STUDIES: tuple[tuple[ModuleType, int, int, str | None], ...] = (
    (agents, 60, 2, None),
    (answers, 24, 2, "texts; as many as make whole batches"),
    (drafts, 4, 1, "texts of each kind"),
    (quotas, 12, 2, None),
)
"""Modules that measure lines of their own and write a table of them; --samples, its least, and what it counts."""


def _add_command(study: ModuleType, count: int, least: int, of: str | None) -> None:
    name = study.__name__.rpartition(".")[2]

    def run_study(
        model: Model = MODEL,
        samples: Annotated[int, typer.Option(min=least, help=of)] = count,
        out: Annotated[Path, typer.Option(help="folder of the lines")] = LINES,
    ) -> None:
        tokenizer, loaded = load_model(model)
        path = out / f"{name}.jsonl"
        for line in append(path, study.measure(loaded, tokenizer, samples, read_lines(path))):
            print(line, flush=True)
        print(study.write_table(path))
        if study is drafts:
            drafts.show_offloaded(loaded, tokenizer)
            drafts.draw(path, Path("docs/results/lossless.png"))

    app.command(name, help=(study.__doc__ or "").partition("\n")[0])(run_study)


for one in STUDIES:
    _add_command(*one)


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
    _refuse_unknown(names, known, "task")
    small_runs.run(names, out, _split(models), samples, tuple(_split(policies)), jobs)
    found = small_runs.collect(out)
    if write:
        small_page.write_page(found, Path("docs"))
    else:
        print(small_page.write_sections(found, names or known))


if __name__ == "__main__":
    app()
