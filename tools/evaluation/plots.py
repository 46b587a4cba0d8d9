"""A task's results as a picture: the headline against the budget, or against what the cache holds."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpatch.plotting import new_figure, save, style

from .table import Table
from .task import Task

FULL, CHANCE, RANDOM = "full", "chance", "random"


@dataclass(frozen=True)
class Point:
    """Mean of one setting in one panel, with its interval.

    name: of the setting; "full" and "chance" are drawn as lines. x: where it stands: the budget, or the share held.
    """

    panel: str
    name: str
    k: Any
    x: float
    mean: float
    low: float
    high: float


def points(table: Table, task: Task, title: str, group: dict[str, Any]) -> list[Point]:
    """Every setting of a part of a task's samples, at its budget; full, random and chance are always there."""
    here = table.where(**group) if group else table
    found = []
    for name, k in [(FULL, 1.0), *((name, k) for name in here.names for k in here.budgets if isinstance(k, int | float))]:
        estimate = here.mean((name, k), task.metric)
        if estimate is not None:
            found.append(Point(title, name, k, float(k), estimate.mean, estimate.low, estimate.high))
    for k in here.budgets:
        if isinstance(k, int | float) and (luck := task.chance(k, group)) is not None:
            found.append(Point(title, CHANCE, k, float(k), luck, luck, luck))
    return found


def curves(table: Table, task: Task, path: Path) -> None:
    """A panel per part of the task's samples, against the budget."""
    parts = [(" ".join(f"{name} {value}" for name, value in group.items()), group) for group in table.parts(task.split)]
    draw([one for title, group in parts for one in points(table, task, title, group)], task, task.name, "budget k", path)


def draw(found: Sequence[Point], task: Task, title: str, across: str, path: Path) -> None:
    """Draw a panel per title, a line with its interval per setting, in the colours of the whole project."""
    panels = list(dict.fromkeys(one.panel for one in found))
    figure = new_figure(figsize=(max(4.2 * len(panels), 6) + 1.8, 4.4), layout="constrained")
    grid = figure.subplots(1, max(len(panels), 1), squeeze=False, sharey=True)[0]
    for axes, panel in zip(grid, panels, strict=False):
        _panel(axes, [one for one in found if one.panel == panel])
        axes.set_title(textwrap.fill(panel, 44), loc="left", fontsize=10)
        axes.set_xlabel(textwrap.fill(across, 44), fontsize=9)
    words = task.metrics[task.metric]
    grid[0].set_ylabel(textwrap.fill(f"{words} ({task.better} is better)" if task.better else words, 46), fontsize=9)
    handles = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    save(figure, path)


def _panel(axes: Any, found: Sequence[Point]) -> None:
    for name in dict.fromkeys(one.name for one in found):
        own = sorted((one for one in found if one.name == name), key=lambda one: one.x)
        x, mean = [one.x for one in own], [one.mean for one in own]
        if name == FULL:
            axes.axhline(mean[0], color="black", lw=1, label=FULL)
        elif name == CHANCE:
            axes.plot(x, mean, color="black", ls=":", lw=1, label=CHANCE)
        else:
            colour, marker = style(name)
            dashes = ":" if name == RANDOM else "--" if name.startswith("critical") else "-"
            axes.plot(x, mean, label=name, marker=marker, ms=4.5, color=colour, ls=dashes, lw=1.5)
            axes.fill_between(x, [one.low for one in own], [one.high for one in own], color=colour, alpha=0.1, lw=0)
    axes.grid(alpha=0.25)
