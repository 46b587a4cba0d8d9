"""Is a budget by mass a better way to spend memory? Beside each a fixed budget of as many tokens.

A setting's `k` is the mass. `snapkv, mass` holds what that takes, `snapkv, as many` in each head the mean of it over heads,
layers and samples. Sizes that are protected are tokens, since a mass gives no size that a share could be of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import kvpatch
from kvpatch.evaluation.teacher_forcing import feed

from .recall import Recall
from .stats import Estimate
from .summary import markdown, shown
from .table import Table
from .task import FULL, SMALL, Request, Sample, Setting, Subject, Task
from .together import seed_of, together

OPTIONS: dict[str, dict[str, Any]] = {
    "snapkv": SMALL["snapkv"],
    "h2o": {"recent": 16},
    "roco": {"recent": 10, "protected": 0},
}
WAYS = ("mass", "as many")
HELD = "share of its text that a head holds"


class _Paired(Task):
    """A task whose settings are masses, each followed by the fixed budget of the same mean size."""

    source = ""
    budgets = (0.7, 0.9)
    policies = tuple(OPTIONS)

    def settings(self, request: Request, subject: Subject) -> list[Setting]:
        return [FULL] + [
            Setting(policy, mass, OPTIONS.get(policy, {}), f"{policy}, {way}")
            for mass in request.budgets or self.budgets
            for policy in request.policies or self.policies
            for way in WAYS
        ]

    def text(self, sample: Sample) -> tuple[Tensor, int]:
        """Tokens [T] that are fed, and how many of them at once."""
        raise NotImplementedError

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        if setting == FULL:
            yield from super().run(subject, setting, samples, request, seed)
            return
        groups = dict.fromkeys(tuple(sample.group.items()) for sample in samples)  # samples are in this order
        for group in groups:
            here = [sample for sample in samples if tuple(sample.group.items()) == group]
            way = replace(setting, k=kvpatch.Mass(setting.k))
            held = self._held(subject, way, here, request.batch, seed)
            if setting.name.endswith(WAYS[1]):
                mean = max(1, round(sum(held) / len(held)))
                way, held = replace(setting, k=mean), [float(mean)] * len(held)
            found = super().run(subject, way, here, request, seed)
            for one, tokens, sample in zip(found, held, here, strict=True):
                yield {**one, "held": tokens / self._most(setting, sample)}

    def _most(self, setting: Setting, sample: Sample) -> int:
        """Tokens that could go: a policy that evicts once keeps what follows the prompt."""
        ids_T, n = self.text(sample)
        return n if kvpatch.get_policy(setting.policy).schedule == "prompt" else len(ids_T)

    def _held(self, subject: Subject, way: Setting, samples: list[Sample], size: int, seed: int) -> list[float]:
        """Tokens that a head holds on average in each sample, without those that nothing evicts."""
        found: list[float] = []
        for part, draw in together(samples, size, way):
            texts, (_, n) = [self.text(sample)[0] for sample in part], self.text(part[0])
            ids_BT = torch.stack(texts).to(subject.model.device)
            with way.patched(subject.model, seed_of(seed, draw)) as patch:
                feed(subject.model, ids_BT, n)
                held_B = patch.report().held().double().mean((0, 2))
            found += (held_B - (ids_BT.shape[1] - self._most(way, part[0]))).tolist()
        return found


class Mass(_Paired, Recall):
    name = "mass"
    about = "Recall under budgets by mass, and under fixed ones of the same mean size."
    metrics: ClassVar[dict[str, str]] = Recall.metrics | {"held": HELD}
    count = 24
    options: ClassVar[dict[str, Any]] = Recall.options | {"scenarios": "in"}

    def text(self, sample: Sample) -> tuple[Tensor, int]:
        rows = sample.data.rows
        return rows.tokens_BT[0, :-1], rows.prompt_length


# ---- the section of docs/small-models.md ----

TITLE = "Budgets by mass"
INTRODUCTION = f"""\
`k=kvpatch.Mass(0.9)` lets each head hold the fewest tokens whose scores sum to 0.9 of all scores. Beside it the fixed `k`
that holds as many tokens on average over heads, layers and samples. h2o with 16 recent tokens, roco with 10 and none of high
deviation, snapkv with a window of 8. held: {HELD} under the mass."""


def section(tables: dict[str, Table], title: Callable[[str, dict[str, Any]], str]) -> str:
    """What a mass takes of each policy and text, what it costs, and what a fixed budget of the same size costs.

    title: of a part of a task's samples.
    """
    parts: list[tuple[Task, dict[str, Any]]] = [(Mass(), {"scenario": "in"})]
    lines = [f"## {TITLE}", "", INTRODUCTION, ""]
    for task, part in parts:
        if task.name in tables:
            lines += _part(tables[task.name].where(**part), task, title(Recall.name, part))
    return "\n".join(lines) if len(lines) > 4 else ""


def _part(table: Table, task: Task, name: str) -> list[str]:
    samples = len({(line["model"], line["seed"], line["sample"]) for line in table.lines if "sample" in line})
    rows, sides = [], [0, 0]
    for policy in task.policies:
        for mass in table.budgets:
            own, fixed = ((f"{policy}, {way}", mass) for way in WAYS)
            gain = table.difference(own, fixed, task.metric)
            sides[0] += _side(gain, task) > 0
            sides[1] += _side(gain, task) < 0
            means = (table.mean(own, "held"), table.mean(own, task.metric), table.mean(fixed, task.metric))
            rows.append([f"`{policy}`", f"{mass:g}", *map(shown, means), shown(gain, signed=True), _better(gain, task)])
    head = ("", "mass", "held", f"{task.metric}, mass", "as many tokens", "mass - fixed", "models that a mass is better on")
    return [
        f"### {name[0].upper()}{name[1:]}: mass", "",
        f"`python -m tools.evaluation {task.name}`. {samples:,} samples, {len(table.models)} models. `{task.metric}`: "
        f"{task.metrics[task.metric]}. Full cache: {shown(table.mean(('full', 1.0), task.metric))}.", "",
        markdown(head, rows), "",
        f"A mass is better in {sides[0]} of {len(rows)} rows, worse in {sides[1]}: there the interval leaves zero out.", "",
    ]  # fmt: skip


def _side(gain: Estimate | None, task: Task) -> int:
    """1 where the mass is better, -1 where it is worse, 0 where the interval holds zero."""
    if gain is None or gain.low <= 0 <= gain.high:
        return 0
    return 1 if (gain.mean > 0) == (task.better == "higher") else -1


def _better(gain: Estimate | None, task: Task) -> str:
    """Models on which the mass is better, of those measured."""
    if gain is None:
        return "-"
    return f"{gain.signs[0 if task.better == 'higher' else 1]} of {gain.models}"
