"""The pictures of docs/small-models.md, drawn from docs/results/means.jsonl: the means, without the lines of every sample.

python -m tools.evaluation.results --pictures        draws them again and measures nothing
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvpatch.policies import POLICIES

from . import plots
from .plots import Point
from .table import Table
from .task import Task
from .tasks import get_task

HELD = "KV bytes held when the last answer is due, share of the full cache's"
KEPT = "budget, share of the text"
NEEDLES = (64, 128, 232)  # tokens of the contexts


@dataclass(frozen=True)
class Panel:
    """A part of a task's samples, in words.

    lengths: tokens of the prompt, and tokens that follow until the last answer is due, of the samples; empty where the
    budget itself is what is held.
    """

    title: str
    part: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[tuple[int, int], ...] = ()

    def held(self, name: str, k: float, schedule: str) -> float:
        """The share of a full cache that a setting holds when the last answer is due."""
        if name == plots.FULL or not self.lengths:
            return 1.0 if name == plots.FULL else float(k)
        shares = [_held(k if isinstance(k, int) else int(k * n + 1e-6), n, m, schedule) / (n + m) for n, m in self.lengths]
        return sum(shares) / len(shares)


def _held(budget: int, n: int, m: int, schedule: str) -> int:
    """Tokens per head of a text of n tokens and m more."""
    if schedule == "prompt":
        return min(budget, n) + m
    return n + min(budget, m) if schedule == "decode" else min(budget, n + m)


@dataclass(frozen=True)
class Picture:
    """The picture of one task. schedule: of all settings, where the task says so.

    own: False where overview.py alone shows it.
    """

    title: str
    panels: tuple[Panel, ...]
    across: str = HELD
    schedule: str | None = None
    own: bool = True

    def titled(self, part: dict[str, Any]) -> str:
        """The title of the panel of these samples."""
        return next(one.title for one in self.panels if one.part == part)

    def placed(self, point: Point, held: float | None = None) -> Point:
        """The point where what its setting holds puts it, or a measured share `held`."""
        panel = next(one for one in self.panels if one.title == point.panel)
        policy = POLICIES.get(point.name.partition(",")[0])
        own = self.schedule or (policy.schedule if policy else "both")
        return replace(point, x=round(panel.held(point.name, point.k, own) if held is None else held, 4))


def _needles(title: str, scenario: str, kind: str) -> Panel:
    asked, answered = (5, 3) if kind == "single" else (20, 18)
    own = tuple((n + 2, answered - 1) if scenario == "regular" else (n, asked - 1) for n in NEEDLES)
    return Panel(title, {"scenario": scenario, "kind": kind}, own)


def title(task: str, part: dict[str, Any]) -> str:
    """A part of a task's samples in words; "" for all of them, as a heading has it."""
    panels = PICTURES[task].panels if part and task in PICTURES else ()
    return next((one.title for one in panels if one.part == part), ", ".join(str(value) for value in part.values()))


PICTURES = {
    "recall": Picture(
        "Questions answered from a context of 216 tokens",
        (
            Panel("the question is in the prompt", {"scenario": "in"}, ((218, 2),)),
            Panel("questions come after the prompt", {"scenario": "after"}, ((216, 39),)),
            Panel("the context is read in blocks, questions follow", {"scenario": "stream"}, ((216, 39),)),
        ),
    ),
    "later": Picture("Questions after compression", (Panel("questions come after the prompt", {}, ((216, 39),)),), own=False),
    "reasoning": Picture("Long reasoning", (Panel("a trace of 577 tokens"),), KEPT, own=False),
    "needle": Picture(
        "Facts found again in contexts of 64, 128 and 232 tokens",
        (
            _needles("one asked, question in the prompt", "regular", "single"),
            _needles("all asked, first question in the prompt", "regular", "multi"),
            _needles("one asked, after the prompt", "context", "single"),
            _needles("all asked, after the prompt", "context", "multi"),
        ),
    ),
    "jaccard": Picture("Consistency of scores: overlap with the full cache's choice", (Panel("nothing protected"),), KEPT),
    "perturbation": Picture(
        "How far attention's output moves",
        tuple(
            Panel(f"{task}, {when}", {"scenario": f"{task} {short}"})
            for task in ("recall", "needle")
            for short, when in (("in", "question in the prompt"), ("after", "questions after it"))
        ),
        "budget, share of the prompt",
    ),
    "sparsity": Picture("Attention kept", (Panel("generated rows"),), "share of the tokens so far that the query finds"),
}


def means(table: Table, task: Task, parts: Iterable[dict[str, Any]]) -> list[Point]:
    """What the picture of a task is drawn from: these parts of its samples, each setting where what it holds puts it."""
    picture, found = PICTURES.get(task.name), []
    for part in parts:
        panel = picture.titled(part) if picture else title(task.name, part)
        for point in plots.points(table, task, panel, part):
            held = table.where(**part).mean((point.name, point.k), "held") if "held" in task.metrics else None
            found.append(picture.placed(point, None if held is None else held.mean) if picture else point)
    return found


def write(found: dict[str, list[Point]], path: Path) -> None:
    """A line of JSON per point."""
    lines = (json.dumps({"task": task, **asdict(one)}) for task, every in found.items() for one in every)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read(path: Path) -> dict[str, list[Point]]:
    """What `write` wrote, by task."""
    found: dict[str, list[Point]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        found.setdefault(one.pop("task"), []).append(Point(**one))
    return found


def draw(found: Mapping[str, Sequence[Point]], folder: Path, task_of: Callable[[str], Task] = get_task) -> None:
    """Write TASK.png for every task that has a picture of its own."""
    for name, own in found.items():
        picture = PICTURES.get(name) or Picture(name, (), "budget k")
        if picture.own:
            plots.draw(own, task_of(name), picture.title, picture.across, folder / f"{name}.png")
