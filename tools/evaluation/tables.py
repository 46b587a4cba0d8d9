"""The papers' own tables, our numbers beside theirs, one command each.

    python -m tools.evaluation.tables                                     which there are
    python -m tools.evaluation.tables keyformer-3 --dry-run               what would run, how long, what is downloaded
    python -m tools.evaluation.tables keyformer-3 --model MPT-7B=/data/mpt-7b --device cuda --dtype bfloat16
    python -m tools.evaluation.tables keyformer-3 --local                 the same code on the shipped models, in a minute

Rows, columns and numbers are published.json's, what fills a cell is published.py's. DIR/NAME/MODEL has a line per sample as it
comes: the same command goes on where it stopped. DIR/NAME.md is the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import transformers
import typer

from kvpatch.cli.commands import short_errors
from kvpatch.errors import KVPatchError, suggest
from tools.evaluation import runs
from tools.evaluation.by_token import ByToken
from tools.evaluation.estimate import Way, dry
from tools.evaluation.lines import Book, versions
from tools.evaluation.published import HARNESS, MODELS, PUBLISHED, Cell, Job, Published, get
from tools.evaluation.summary import markdown
from tools.evaluation.table import Table
from tools.evaluation.task import FULL, PYTHON, SMALL, Request, Setting, Subject
from tools.evaluation.tasks import get_task

LOCAL_TASKS = {"loglikelihood": ("kvp_recall", "acc"), "generate_until": ("kvp_answer", "exact_match")}
"""What stands in for the harness' tasks where nothing may be downloaded: examples/lm_eval_tasks."""

Subjects = dict[str, Subject]


# ---- local: the same cells from shipped models ----


def local(cell: Cell) -> Cell:
    """The same measured on a shipped model, with what it knows in place of data sets."""
    jobs = tuple(dict.fromkeys(_local(job) for job in cell.jobs))
    over = cell.over and _short(cell.over)
    where = {} if cell.metric == "value" else cell.where
    return replace(cell, jobs=jobs, setting=_short(cell.setting), over=over, where=where)


def _local(job: Job) -> Job:
    if job.task == HARNESS:
        data, read = LOCAL_TASKS["generate_until" if job.new else "loglikelihood"]
        return replace(job, model="llama-0", data=data, read=read, chat=False, options=job.options[:1])
    options = {"longbench": (("sets", "lcc"), ("scenario", "context")), "instruct": ()}.get(job.task, job.options)
    model = PYTHON if job.task in ("instruct", "longbench") else "llama-0"
    return replace(job, model=model, data="", options=options)


def _short(setting: Setting) -> Setting:
    """With an observation window, and a number of generated tokens, that suit two hundred tokens."""
    small = {name: value for name, value in SMALL.get(setting.policy, {}).items() if name in setting.options}
    return replace(setting, k=24 if isinstance(setting.k, int) else setting.k, options=setting.options | small)


# ---- running ----


def settings_of(cells: Iterable[Cell]) -> dict[Job, list[Setting]]:
    """Every job with the settings that it is to be run under, each once, in order."""
    found: dict[Job, dict[str, Setting]] = {}
    for cell in cells:
        for job in cell.jobs:
            found.setdefault(job, {}).update({one.key: one for one in cell.settings})
    return {job: list(settings.values()) for job, settings in found.items()}


def measure(job: Job, settings: list[Setting], way: Way, subjects: Subjects, timed: bool = False) -> Table:
    """The job's lines; what is there already is not run again."""
    request = Request(
        models=(way.places.get(job.model, job.model),), count=way.samples or job.samples, batch=way.batch,
        data=job.data or None, options=dict(job.options), dtype=way.dtype, device=way.device, out=_folder(job, way),
    )  # fmt: skip
    assert request.models is not None
    place = request.models[0]
    if place not in subjects:
        subjects.clear()  # one large model at a time
        subjects[place] = runs.load(place, request)
    subject = subjects[place]
    task = None if job.task == HARNESS else ByToken() if job.task == ByToken.name else get_task(job.task)
    book = Book(request.out / f"{job.task}.jsonl")
    try:
        if task is None:
            for setting in settings:
                _harness(job, setting, subject, request, book)
        else:
            others = [one for one in settings if one.policy != "full"]
            runs.run(task, request, book, settings=[FULL, *others], subject=subject)
        if timed and task is not None:
            for setting in settings:
                _prompt(subject, setting, task.samples(subject, request, 0)[0], book)
    finally:
        book.close()
    return Table(book.lines)


def _folder(job: Job, way: Way) -> Path:
    """One for every job: settings of several tables share what was run."""
    options = "-".join(f"{name}={value}" for name, value in job.options)
    return way.out / job.model / "-".join(part for part in (job.data.replace("/", "_") or "made", options) if part)


def _line(
    subject: Subject, setting: Setting, task: str, sample: str, scenario: str, metrics: dict[str, float]
) -> dict[str, Any]:
    """As runs.run writes them."""
    return {
        "task": task, "model": subject.name, "recipe": subject.recipe, "setting": setting.key, "name": setting.name,
        "policy": setting.policy, "k": setting.k, "options": setting.options, "seed": 0, "sample": sample, "digest": "",
        "n": 0, "group": {"scenario": scenario}, "metrics": metrics,
        "device": runs.device_name(subject.model.device), "dtype": str(subject.model.dtype), "versions": versions(),
    }  # fmt: skip


def _harness(job: Job, setting: Setting, subject: Subject, request: Request, book: Book) -> None:
    """One task of lm-evaluation-harness as one line."""
    from examples.lm_eval_harness import evaluate
    from kvpatch.evaluation.lm_eval import KVPatchLM

    if book.find(subject.name, setting.key, 0, job.data) is not None:
        return
    options = {"num_fewshot": dict(job.options).get("num_fewshot"), "limit": request.count, "apply_chat_template": job.chat}
    about = {} if not job.read.isdigit() else {"tokenizer": subject.model.name_or_path, "max_seq_lengths": [int(job.read)]}
    how: dict[str, Any] = {"policy": setting.policy, "k": setting.k, **setting.options}
    lm = KVPatchLM(subject.model, tokenizer=subject.tokenizer, batch_size=request.batch, **how)
    try:
        found = evaluate(lm, [job.data], metadata=about or None, **options)["results"][job.data]
    finally:
        lm.patch.remove()
    book.add(_line(subject, setting, HARNESS, job.data, "harness", {"value": float(found[f"{job.read},none"])}))


@torch.no_grad()
def _prompt(subject: Subject, setting: Setting, sample: Any, book: Book, times: int = 3) -> None:
    """The seconds that a prompt takes, the median of a few."""
    if book.find(subject.name, setting.key, 0, "prompt") is not None:
        return
    ids_1T = torch.tensor([sample.data.ids], device=subject.model.device)
    seconds = []
    with setting.patched(subject.model):
        for _ in range(times):
            began = time.perf_counter()
            subject.model(ids_1T, use_cache=True).logits[:, -1].sum().item()
            seconds.append(time.perf_counter() - began)
    book.add(_line(subject, setting, "prompt", "prompt", "timing", {"prompt_seconds": median(seconds)}))


def value(cell: Cell, tables: Mapping[Job, Table]) -> float | None:
    """The mean over jobs of what was measured; None where a job has nothing of it."""

    def of(setting: Setting) -> float | None:
        found = []
        for job in cell.jobs:
            here = tables[job].where(**cell.where)
            one = here.mean((setting.name, 1.0 if setting.policy == "full" else setting.k), cell.metric)
            if one is None:
                return None
            found.append(one.mean)
        return mean(found)

    own, base = of(cell.setting), None if cell.over is None else of(cell.over)
    if own is None or (cell.over is not None and base is None):
        return None
    return cell.scale * (own if base is None else base / own)


def page(one: Published, ours: list[list[float | None]], rows: list[Any], said: str) -> str:
    """The paper's rows and columns, with its number beside each of ours."""

    def shown(number: float | None, digits: int = 2) -> str:
        return "" if number is None else f"{number:.{digits}f}"

    heads = [*one.labels, *(part for column in one.columns for part in (column, "paper"))]
    lines = [
        [*labels, *(shown(number) for pair in zip(own, numbers, strict=True) for number in pair)]
        for (labels, numbers), own in zip(rows, ours, strict=True)
    ]
    notes = "".join(f"- {note}\n" for note in (said, *one.notes))
    return f"# {one.title}\n\n{markdown(heads, lines)}\n\n{notes}"


def places_of(given: list[str] | None) -> dict[str, str]:
    """--model NAME or NAME=PATH; all models where none is given. Raises KVPatchError for a name that no paper has."""
    if not given:
        return {name: hub for name, (hub, _) in MODELS.items()}
    found = {}
    for text in given:
        name, _, place = text.partition("=")
        if name not in MODELS:
            known = ", ".join(MODELS)
            raise KVPatchError(f"--model {name} is in none of the tables.{suggest(name, MODELS)} They have: {known}.")
        found[name] = place or MODELS[name][0]
    return found


def make(one: Published, way: Way, on_shipped: bool = False) -> str:
    """The page of one table; with `on_shipped` from shipped models."""
    cells = {(labels, column): cell for labels, column, _, cell in one.cells() if cell.jobs[0].model in way.places}
    if not cells:
        raise KVPatchError(f"{one.name} has no row of {', '.join(way.places)}.")
    if on_shipped:
        cells = {key: local(cell) for key, cell in cells.items()}
    wanted, subjects = settings_of(cells.values()), Subjects()
    timed = any(cell.over is not None for cell in cells.values())
    tables = {job: measure(job, settings, way, subjects, timed) for job, settings in wanted.items()}
    rows = [row for row in one.rows if any((row[0], column) in cells for column in one.columns)]
    ours = [[value(cells[row[0], c], tables) if (row[0], c) in cells else None for c in one.columns] for row in rows]
    ran = ", ".join(dict.fromkeys(way.places.get(job.model, job.model) for job in wanted))
    said = f"Ours: {ran}; at most {max(way.samples or job.samples for job in wanted)} samples a job."
    if on_shipped:
        said += " A shipped model stands in for the paper's: this shows that the table runs."
    return page(one, ours, rows, said)


def main(
    table: Annotated[str | None, typer.Argument(help="one of the tables; without one they are listed")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would run, and run nothing")] = False,
    on_shipped: Annotated[bool, typer.Option("--local", help="on shipped models: nothing is downloaded")] = False,
    model: Annotated[list[str] | None, typer.Option("--model", help="NAME or NAME=PATH; may be repeated")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="of each job; else its own number, with --local 2")] = None,
    batch: Annotated[int, typer.Option(min=1, help="rows at a time")] = 8,
    dtype: Annotated[str, typer.Option(help="of models that are not shipped")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    out: Annotated[Path, typer.Option(help="where lines and tables go")] = Path("out/tables"),
) -> None:
    """Make one of the papers' tables."""
    with short_errors():
        if table is None:
            print("\n".join(f"{name:24} {one.title}" for name, one in PUBLISHED.items()))
            return
        one, way = get(table), Way(out / table, places_of(model), samples, batch, dtype, device)
        if dry_run:
            print(dry(one, settings_of(cell for *_, cell in one.cells() if cell.jobs[0].model in way.places), way))
            return
        transformers.logging.set_verbosity_error()
        text = make(one, replace(way, samples=samples or 2) if on_shipped else way, on_shipped)
        (out / f"{table}.md").write_text(text, encoding="utf-8")
        print(text)


if __name__ == "__main__":
    typer.run(main)
