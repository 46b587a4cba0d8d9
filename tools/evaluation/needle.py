"""Is what was hidden in a context found again, by its depth and the context's length [CriticalKV 4.4, Figures 1, 2]?

Two scenarios [CriticalKV 4.2]: `regular`, the question stands in the prompt and is compressed with it; `context`, the
question comes after the context was compressed. Two kinds [CriticalKV 4.4]: `single`, one thing is asked for, whose
depth is set; `multi`, four are, which lie anywhere (depth "all").

The shipped models search for records of tools/training/tasks.py, `k v v v` among filler. Four are in every context, so that the
answer is never the only record there is. `single` asks for one: its first token stands at the depth's share of the
places where a whole record fits, from right behind <bos> (0) to the context's end (1). The rest of the context is the
same at every depth, and in both scenarios. `multi` asks for all four one after another; of these questions, `regular`
has only the first in the prompt.

Questions and answers behind the prompt are fed token by token, which makes each a decode step: policies that evict
once, after the prompt, leave them whole, and under the others the budget simply holds.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpatch.errors import KVPatchError
from kvpatch.evaluation.teacher_forcing import positions_of
from tools.training import tasks

from .heatmap import heatmap
from .summary import budget
from .task import FULL, Request, Sample, Setting, Subject, Task, check_vocabulary, digest
from .together import ROWS_PER_DRAW, Known, feed_answers

LENGTHS, DEPTHS = (64, 128, 232), (0.0, 0.25, 0.5, 0.75, 1.0)
SCENARIOS = ("regular", "context")
NEEDLES, SIZE = 4, 4
"""Records in a context, and tokens of a record: the key and its three values."""
Cells = dict[tuple[str, int, float], list[float]]
"""Shares of right answers by policy, length and depth."""


def place(depth: float, length: int) -> int:
    """Where a record starts at this depth of a context of `length` tokens, <bos> included."""
    return 1 + round(depth * (length - 1 - SIZE))


def haystacks(rng: random.Random, length: int, depths: tuple[float, ...]) -> tuple[list[int], list[Tensor]]:
    """A record, and one context per depth with it; nothing else differs between them.

    Raises:
        KVPatchError: three other records leave no room for one at these depths.
    """
    if length < 1 + NEEDLES * SIZE:
        raise KVPatchError(f"length={length}: {NEEDLES} records need {1 + NEEDLES * SIZE}; give longer -o lengths=.")
    places = [place(depth, length) for depth in depths]
    for _ in range(1000):
        # no key is asked for here: the row is <bos>, filler and three records
        rest_T = tasks.needle(rng, 1, context=length - SIZE, needles=NEEDLES - 1, questions=0).tokens_BT[0]
        inside = {at + i for at, token in enumerate(rest_T.tolist()) if token in tasks.KEYS for i in range(1, SIZE)}
        if inside.isdisjoint(places):
            break
    else:
        raise KVPatchError(f"length={length}: records do not fit between depths {depths}; give fewer or longer ones.")
    taken = set(rest_T.tolist())
    key = rng.choice([token for token in tasks.KEYS if token not in taken])
    record = [key, *rng.sample([token for token in tasks.VALUES if token not in taken], SIZE - 1)]
    return record, [torch.cat([rest_T[:at], torch.tensor(record), rest_T[at:]]) for at in places]


def sequences(seed: int, index: int, length: int, depths: tuple[float, ...]) -> Iterator[tuple[str, Any, tasks.Batch]]:
    """Kind, depth and tokens of one sample index, answers included; where the prompt ends is left to the scenario."""
    rng = random.Random(f"needle {seed} {length} {index}")
    record, contexts = haystacks(rng, length, depths)
    answers_AW = length + torch.arange(2, 2 + SIZE - 1)[None]
    for depth, context_T in zip(depths, contexts, strict=True):
        tokens_T = torch.cat([context_T, torch.tensor([tasks.QUESTION, *record])])
        yield "single", depth, tasks.Batch(tokens_T[None], length, answers_AW)
    yield "multi", "all", tasks.needle(rng, 1, context=length, needles=NEEDLES, questions=NEEDLES, in_prompt=False)


class Needle(Task):
    name = "needle"
    about = "What was hidden in a context is found again, by depth and length."
    source = "[CriticalKV 4.4, Figures 1 and 2]"
    metric = "right"
    split = ("scenario", "kind")
    metrics: ClassVar[dict[str, str]] = {"right": "share of what was asked for that is given back in full"}
    budgets = (0.1, 0.3)
    count = 3  # of each scenario, kind, length and depth
    options: ClassVar[dict[str, Any]] = {"lengths": None, "depths": DEPTHS}

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        """`count` per scenario, kind, length and depth.

        Raises:
            KVPatchError: a model that does not know the words, or a length or depth that cannot be.
        """
        check_vocabulary(subject, self.models[0])
        depths = as_tuple(self.option(request, "depths"))
        if not depths or not all(isinstance(depth, int | float) and 0 <= depth <= 1 for depth in depths):
            raise KVPatchError(f"depths={depths}: give shares of the context from 0 to 1, such as -o depths=0,0.5,1.")
        lengths, count = self.option(request, "lengths"), request.count or self.count
        return records(subject, as_tuple(lengths or LENGTHS), depths, count, seed)

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        for _, right_A in feed_answers(subject, setting, samples, request.batch, seed):
            yield {self.metric: right_A.float().mean().item()}

    def chance(self, k: Any, group: dict[str, Any]) -> float | None:
        """The share that is kept: a policy that keeps one stretch, wherever, has so much of all depths together."""
        if isinstance(k, float):
            return min(k, 1.0)
        return min(1.0, k / group["length"]) if isinstance(k, int) and "length" in group else None

    def pictures(self, table: Any, out: Path) -> None:
        """needle-SCENARIO-BUDGET.png: length by depth for every setting, full and chance among them."""
        for scenario in table.groups.get("scenario", ()):
            cells: dict[Any, Cells] = defaultdict(lambda: defaultdict(list))
            for line in table.lines:
                group = line.get("group", {})
                if group.get("scenario") == scenario and group.get("kind") == "single":
                    k = None if line["policy"] == FULL.policy else line["k"]
                    cells[k][line["name"], group["length"], group["depth"]].append(line["metrics"][self.metric])
            whole = cells.pop(None, {})
            for k, found in cells.items():
                path = out / f"{self.name}-{scenario}-{budget(k)}.png"
                self._picture({**whole, **found}, k, f"{scenario}, k = {budget(k)}", path)

    def _picture(self, found: Cells, k: Any, title: str, path: Path) -> None:
        lengths, depths = sorted({length for _, length, _ in found}), sorted({depth for _, _, depth in found})
        panels: dict[str, list[list[float | None]]] = {}
        for name in dict.fromkeys(name for name, _, _ in found):
            means = {at[1:]: sum(values) / len(values) for at, values in found.items() if at[0] == name}
            panels[name] = [[means.get((length, depth)) for depth in depths] for length in lengths]
        if self.chance(k, {"length": lengths[0]}) is not None:
            panels["chance"] = [[self.chance(k, {"length": length})] * len(depths) for length in lengths]
        titles = {name: f"{name} ({title})" if i == 0 else name for i, name in enumerate(panels)}
        heatmap(panels, lengths, depths, "tokens of the context", "depth", titles, path)


def records(subject: Subject, lengths: tuple[int, ...], depths: tuple[float, ...], count: int, seed: int) -> list[Sample]:
    """The synthetic samples: those that can be fed together stand together."""
    limit, tail = positions_of(subject.model), NEEDLES * (1 + SIZE)
    found = []
    for length in lengths:
        if not isinstance(length, int) or (limit is not None and length + tail > limit):
            raise KVPatchError(
                f"lengths={length}: {subject.name} has {limit} positions, {tail} of them for questions; "
                f"give such as -o lengths={','.join(map(str, LENGTHS))}."
            )
        made = [(i, *one) for i in range(count) for one in sequences(seed, i, length, depths)]
        for scenario in SCENARIOS:
            for index, kind, depth, whole in sorted(made, key=lambda one: one[1], reverse=True):
                n = length + (2 if scenario == "regular" else 0)
                draw = index if kind == "single" else index // ROWS_PER_DRAW
                known = Known(tasks.Batch(whole.tokens_BT, n, whole.answers_AW), draw)
                group = {"scenario": scenario, "kind": kind, "length": length, "depth": depth}
                name = "/".join(map(str, [*group.values(), index]))
                found.append(Sample(name, n, known, group, digest(whole.tokens_BT, n)))
    return found


def as_tuple(value: Any) -> tuple[Any, ...]:
    """An option that may be one value or several."""
    return () if value is None else tuple(value) if isinstance(value, tuple | list) else (value,)
