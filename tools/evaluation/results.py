"""Every task at the size that separates what is claimed, and docs/small-models.md from it.

    make small-models                          all of it: two hours of a CPU core, shared by --jobs
    python -m tools.evaluation.results --only needle      one task anew, the rest from the lines that are there
    python -m tools.evaluation.results --alone sinks      its section on models with sinks alone
    python -m tools.evaluation.results --alone primary    its section of primary comparisons alone
    python -m tools.evaluation.results --page             the page alone, from the lines that are there
    python -m tools.evaluation.results --pictures         its pictures and first screen alone, from docs/results/means.jsonl

One process per model and task, one thread each: the same figures on any number of cores. Lines go to
out/results/MODEL/TASK.jsonl; without --fresh a run goes on where another stopped.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from kvpatch.cli.commands import short_errors
from kvpatch.errors import KVPatchError
from tools.evaluation import anew, overview, page, pictures, primary, runs, sinks
from tools.evaluation.claims import table_of
from tools.evaluation.lines import read
from tools.evaluation.models import BESIDE, CODE, FIFTEEN, MORE, PLAIN, SUNK, WALKERS
from tools.evaluation.papers import CLAIMS
from tools.evaluation.table import Table
from tools.evaluation.task import FIVE, Request
from tools.evaluation.tasks import TASKS, get_task

THINKING = ("random", "window", "streaming_llm", "h2o", "scissorhands", "tova", "roco", "keyformer", "key_norm", "key_diff")
THINKING += ("cur", "raas", "lazy", "r_kv", "tri_attention", "vase")

SIZES: dict[str, dict[str, Any]] = {
    "recall": {"models": FIFTEEN, "budgets": (0.1, 0.2, 0.4), "count": 24},
    "later": {"models": FIFTEEN, "budgets": (0.2, 0.4), "count": 24},
    "ablate": {"models": FIFTEEN, "budgets": (0.3,), "count": 24},
    "bits": {"models": FIVE},
    "mass": {"models": FIFTEEN},
    "reasoning": {"models": WALKERS, "budgets": (0.3, 0.5), "count": 12, "policies": THINKING},
    "needle": {"models": FIFTEEN, "budgets": (0.1, 0.3)},
    "jaccard": {"models": FIFTEEN},
    "perturbation": {"models": FIFTEEN},
    "sparsity": {"models": (*FIFTEEN, *CODE)},
    "robustness": {"models": (*FIFTEEN, *CODE)},
}
"""What differs from the tasks' own defaults."""

ALONE = ("sinks", "primary", *(section.task for section in page.SECTIONS if not section.ranked))
"""Parts of the page that can be made by themselves: they share no picture and no sentence with others."""


def requests(out: Path, sizes: dict[str, dict[str, Any]] = SIZES) -> list[tuple[str, Request]]:
    """One for every task and model, the slow ones first."""
    return [
        (name, replace(Request(**{**size, "models": (model,)}), out=out / model))
        for name, size in sizes.items()
        for model in size["models"]
    ]


def fewer(policies: dict[str, tuple[str, ...]], models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The page's sizes with fewer policies by task, and other models."""
    return {name: SIZES[name] | {"models": tuple(models), "policies": chosen} for name, chosen in policies.items()}


def wanted(out: Path, alone: str = "") -> list[tuple[str, Request]]:
    """What a run measures, `alone` for one section; models with sinks bring their lines of that section to the primary one."""
    if alone in SIZES:
        return requests(out, {alone: SIZES[alone]})
    with_sinks = requests(out, fewer(sinks.POLICIES, (*BESIDE, *SUNK) if alone == "sinks" else SUNK))
    if alone == "sinks":
        return with_sinks
    questions = primary.policies(primary.WITHOUT)
    if alone == "primary":
        return requests(out, fewer(questions, PLAIN)) + requests(out, fewer(primary.policies(primary.WITH), SUNK))
    return requests(out) + with_sinks + requests(out, fewer(questions, MORE))


def sections(out: Path, docs: Path, alone: str = "") -> dict[str, str]:
    """The sections that stand beside those of tasks, and those of `alone`, by title; empty where there are no lines."""
    if alone in SIZES:
        return page.of_tasks(collect(out, {alone: SIZES[alone]}), docs)
    found = {}
    if alone != "sinks":
        groups = {group: collect(out, fewer(primary.policies(group), models)) for group, models in primary.MODELS.items()}
        found[primary.TITLE] = primary.section(groups)
    if alone != "primary":
        found[sinks.TITLE] = sinks.section(*(collect(out, fewer(sinks.POLICIES, models)) for models in (BESIDE, SUNK)))
    return {title: text for title, text in found.items() if text}


def run(todo: Sequence[tuple[str, Request]], jobs: int, fresh: bool = False) -> None:
    """Every task on every model, `jobs` at a time."""
    # spawned: a forked torch may hang on locks of threads that are not there
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(measure, name, request, fresh) for name, request in todo]
        for i, one in enumerate(as_completed(waiting), 1):
            print(f"{i}/{len(waiting)} {one.result()}", flush=True)


def claimed(count: int = 8) -> dict[str, dict[str, Any]]:
    """The sizes that the claims need: their policies or families alone, and `count` samples at most."""
    found: dict[str, dict[str, Any]] = {}
    for one in (claim for said in CLAIMS.values() for claim in said):
        names = found.setdefault(one.task, {})
        names |= {name: None for name in (one.a, one.b) if name not in ("", "full")}
    sizes = {}
    for name, names in found.items():
        own = SIZES[name] | {"count": min(count, SIZES[name].get("count", get_task(name).count))}
        families = dict.fromkeys(label.partition(": ")[0] for label in names)
        chosen: dict[str, Any] = {"policies": tuple(dict.fromkeys(map(overview.policy_of, names)))}
        if name == "ablate":
            chosen = {"options": {"families": ",".join(families)}}
        sizes[name] = own | (chosen if names else {"policies": ("window",)})  # the full cache is always there
    return sizes


def claims(out: Path, models: Sequence[str] | None = None, count: int = 8, jobs: int = 2, fresh: bool = False) -> str:
    """The papers' claims on the shipped models, from samples of its own, fewer than the page's. models: those of them alone."""
    sizes = claimed(count)
    if models:
        sizes = {name: size | {"models": tuple(m for m in size["models"] if m in models)} for name, size in sizes.items()}
    run(requests(out, sizes), jobs, fresh)
    tables = collect(out, sizes)
    return "\n".join(f"## {paper}\n\n{table_of(said, tables)}\n" for paper, said in CLAIMS.items())


def measure(name: str, request: Request, fresh: bool = False) -> str:
    """One task on one model; what is there already is not made again, unless `fresh`."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    task = get_task(name)
    book = runs.book_of(task, request.out, fresh)
    try:
        runs.run(task, request, book)
    finally:
        book.close()
    return f"{name} {(request.models or ('',))[0]}"


def collect(out: Path, sizes: dict[str, dict[str, Any]] = SIZES) -> dict[str, Table]:
    """The lines of every task, models in their order; tasks without any are left out."""
    found = {}
    for name in TASKS:
        lines = [line for model in sizes.get(name, {}).get("models", ()) for line in read(out / model / f"{name}.jsonl")]
        if lines:
            found[name] = Table(lines)
    return found


def main(
    only: Annotated[str | None, typer.Option(help="tasks, with commas")] = None,
    out: Annotated[Path, typer.Option(help="where the lines go")] = Path("out/results"),
    docs: Annotated[Path, typer.Option(help="where small-models.md and its pictures go")] = Path("docs"),
    jobs: Annotated[int, typer.Option(min=1, help="processes at a time")] = 2,
    fresh: Annotated[bool, typer.Option("--fresh", help="forget the lines that are there")] = False,
    alone: Annotated[str, typer.Option(help=f"only one part of the page: {', '.join(ALONE)}")] = "",
    page_only: Annotated[bool, typer.Option("--page", help="measure nothing")] = False,
    pictures_only: Annotated[bool, typer.Option("--pictures", help="draw the means of docs/results again")] = False,
) -> None:
    """Measure every task on the shipped models and write docs/small-models.md."""
    if pictures_only:
        means = pictures.read(docs / "results/means.jsonl")
        page.draw(means, docs / "results")
        page.open_with(means, docs)
        return
    with short_errors():
        chosen = list(SIZES) if only is None else only.split(",")
        for name in chosen:
            get_task(name)
        if alone not in ("", *ALONE):
            raise KVPatchError(f"--alone {alone}: it is one of {', '.join(ALONE)}.")
        todo = [] if page_only else [(name, request) for name, request in wanted(out, alone) if name in chosen]
        run(todo, jobs, fresh)
        more, tables = sections(out, docs, alone), {} if alone else collect(out)
        if not (tables or more):
            raise KVPatchError(f"{out} has no results: leave out --page.")
        if alone:
            anew.replace(more, docs)
        else:
            page.write(tables, docs, more)
    print(docs / "small-models.md")


if __name__ == "__main__":
    typer.run(main)
