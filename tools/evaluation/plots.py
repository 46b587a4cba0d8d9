"""A task's results as a picture: the headline against the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpatch.plotting import new_figure, save

from .table import Table
from .task import Task

_COLOURS = [f"C{i}" for i in range(10) if i != 7]  # grey is random's
_STYLES = ("-", "--", "-.", ":")


def curves(table: Table, task: Task, path: Path) -> None:
    """A panel per part, a line with its interval per setting; full, random and chance are always there."""
    parts = table.parts(task.split)
    drawing = new_figure(figsize=(6.2 * len(parts), 4.6), layout="constrained")
    grid = drawing.subplots(1, len(parts), squeeze=False, sharey=True)[0]
    for axes, group in zip(grid, parts, strict=True):
        _panel(axes, table.where(**group), task, group)
    grid[0].set_ylabel(f"{task.metric}: {task.metrics[task.metric]}", fontsize=8)
    handles = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawing.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=8)
    save(drawing, path)


def _panel(axes: Any, table: Table, task: Task, group: dict[str, Any]) -> None:
    numbers = [k for k in table.budgets if isinstance(k, int | float)]
    for i, name in enumerate(table.names):
        found = [(k, estimate) for k in numbers if (estimate := table.mean((name, k), task.metric)) is not None]
        if not found:
            continue
        look = (
            {"color": "0.45", "ls": ":", "lw": 2.5}
            if name == "random"
            else {"color": _COLOURS[i % 9], "ls": _STYLES[i // 9 % 4]}
        )
        budgets = [k for k, _ in found]
        axes.plot(budgets, [one.mean for _, one in found], label=name, marker="o", ms=3, **look)
        axes.fill_between(
            budgets,
            [one.low for _, one in found],
            [one.high for _, one in found],
            color=look["color"],
            alpha=0.12,
            lw=0,
        )
    full = table.mean(("full", 1.0), task.metric)
    if full is not None:
        axes.axhline(full.mean, color="black", lw=1, label="full")
    chance = [(k, luck) for k in numbers if (luck := task.chance(k, group)) is not None]
    if chance:
        axes.plot(*zip(*chance, strict=True), color="black", ls=":", lw=1, label="chance")
    axes.set_title(" ".join(f"{name} {value}" for name, value in group.items()), loc="left", fontsize=10)
    axes.set_xlabel("budget k")
    axes.grid(alpha=0.25)
