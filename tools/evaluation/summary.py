"""A task's results as Markdown: means, and paired differences from the full cache and from a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .stats import Estimate
from .table import Cell, Table
from .task import Task

BRACKETS = (
    "Brackets: 95% by a paired hierarchical bootstrap, trained models and then samples, spread as wide as few models ask for."
)
INTERVALS = (
    f"{BRACKETS} Bold: the interval of the difference leaves zero out, and of three models or more all but one in eight have "
    "that sign."
)


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(columns)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows))


def budget(k: Any) -> str:
    return f"{k:g}" if isinstance(k, int | float) else str(k)


def shown(estimate: Estimate | None, signed: bool = False) -> str:
    """signed: it is a difference, and bold where it is carried."""
    if estimate is None:
        return "-"
    text = f"{estimate.mean:+.3f}" if signed else f"{estimate.mean:.3f}"
    text += f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"**{text}**" if signed and estimate.carried else text


def grid(table: Table, of: Callable[[Cell], str], names: Iterable[str] | None = None) -> str:
    """A row per setting, a column per budget."""
    rows = []
    for name in names or table.names:
        cells = [(name, k) for k in table.budgets]
        rows.append([f"`{name}`", *("does not run" if _runs_nowhere(table, cell) else of(cell) for cell in cells)])
    return markdown(["", *(f"k = {budget(k)}" for k in table.budgets)], rows)


def _runs_nowhere(table: Table, cell: Cell) -> bool:
    return cell in table.errors and cell not in table.values


def remarks(table: Table) -> list[str]:
    """What did not run, and what did not fit its budget; each once."""
    said: dict[str, list[str]] = {}
    refused: dict[tuple[str, str, str], list[str]] = {}
    for (name, k), errors in table.errors.items():
        for model, error in errors.items():
            refused.setdefault((model, error, budget(k)), []).append(f"`{name}`")
    for (model, error, k_shown), names in refused.items():
        verb = "does" if len(names) == 1 else "do"
        said.setdefault(f"{', '.join(names)} {verb} not run on {model}: {error}", []).append(k_shown)
    for (name, k), note in table.notes.items():
        said.setdefault(f"`{name}` {note}", []).append(budget(k))
    return [f"- {text} (k = {', '.join(dict.fromkeys(budgets))})" for text, budgets in said.items()]


def part(table: Table, task: Task, metric: str, baseline: str) -> list[str]:
    """Means, then differences, of one metric over the table's samples."""
    full = table.mean(("full", 1.0), metric)
    lines = [f"`full`: {shown(full)}.\n" if full else "", grid(table, lambda cell: shown(table.mean(cell, metric)))]
    if full:
        lines += [
            "\nDifference from `full`:\n",
            grid(table, lambda cell: shown(table.difference(cell, ("full", 1.0), metric), True)),
        ]
    others = [name for name in table.names if name != baseline]
    if baseline in table.names and others:
        lines += [
            f"\nDifference from `{baseline}` at the same budget:\n",
            grid(table, lambda cell: shown(table.difference(cell, (baseline, cell[1]), metric), True), others),
        ]
    return lines


def _others(table: Table, task: Task, title: str) -> list[str]:
    """What else was measured."""
    lines = []
    for metric in task.metrics:
        found = [(name, k) for name, k in table.cells if table.mean((name, k), metric) is not None]
        if found and metric != task.metric:
            rows = [[f"`{name}`", budget(k), shown(table.mean((name, k), metric))] for name, k in found]
            lines += [f"### {title}{metric}", "", f"{task.metrics[metric]}.", "", markdown(("", "k", metric), rows), ""]
    return lines


def report(table: Table, task: Task, baseline: str) -> str:
    """The whole page of one task."""
    samples = {(line["model"], line["seed"], line["sample"]) for line in table.lines if "sample" in line}
    lines = [f"# {task.name}", "", f"{task.about} {task.source}".strip(), ""]
    lines += [f"{len(samples)} samples of {len(table.models)} models: {', '.join(table.models)}. {INTERVALS}", ""]
    lines += [
        f"Headline: `{task.metric}`, {task.metrics[task.metric]}" + (f" ({task.better} is better)." if task.better else "."),
        "",
    ]
    for group in table.parts(task.split):
        here, name = table.where(**group), ", ".join(f"{name} {value}" for name, value in group.items())
        lines += [f"## {name}", ""] if name else []
        lines += [*part(here, task, task.metric, baseline), ""]
        lines += _others(here, task, f"{name}: " if name else "")
    lines += remarks(table)
    return "\n".join(lines).rstrip() + "\n"
