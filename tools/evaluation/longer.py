"""A thousand tokens: recall, needles, chains of facts and variables (tools/training/tasks.py, ruler.py).

    in       the question stands in the prompt and is compressed with it
    after    the context is compressed, then the question comes

Both read the same context and ask the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from kvpatch.errors import KVPatchError
from kvpatch.evaluation.teacher_forcing import positions_of
from tools.training import ruler, tasks

from .greedy import number
from .recall import Recall
from .task import Request, Sample, Subject

FAMILIES: dict[str, Callable[..., tasks.Batch]] = {
    "recall": partial(tasks.recall, questions=1),
    "needle": tasks.needle,
    "hops": partial(ruler.hops, questions=1),
    "tracking": partial(ruler.tracking, questions=1),
}
SCENARIOS = tuple(f"{family} {when}" for family in FAMILIES for when in ("in", "after"))
CONTEXT, TAIL = 1000, 16
"""Tokens of a context, and positions behind it for a question and its answer."""


class Longer(Recall):
    name = "longer"
    about = "Recall, needles, chains of facts and of variables in a thousand tokens."
    source = "[RULER]"
    metrics: ClassVar[dict[str, str]] = {"right": "share of the answers that are right in all their tokens"}
    models = ("llama-1k-0",)
    budgets = (0.05, 0.1, 0.2)
    count = 16
    options: ClassVar[dict[str, Any]] = {"scenarios": ",".join(SCENARIOS), "context": CONTEXT}
    scenarios = SCENARIOS

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        """Raises KVPatchError as Recall's does, and for a context that has no room for its facts or no positions."""
        limit, context = positions_of(subject.model), number(self, request, "context", CONTEXT)
        if limit is not None and context + TAIL > limit:
            longest = limit - TAIL
            raise KVPatchError(f"context={context}: {subject.name} has {limit} positions; give -o context={longest} or less.")
        try:
            return super().samples(subject, request, seed)
        except ValueError as error:
            raise KVPatchError(f"context={context} is too short ({error}); give -o context=200 or more.") from error

    def sequences(self, request: Request, seed: int, index: int) -> dict[str, tasks.Batch]:
        return {
            f"{family} {when}": make(
                random.Random(f"{family} {seed} {index}"), 1, context=self.option(request, "context"), in_prompt=when == "in"
            )
            for family, make in FAMILIES.items()
            for when in ("in", "after")
        }
