"""Which values followed a key that a context mentions again and again? Recall of tools/training/tasks.py in two scenarios.

    in       the first question stands in the prompt and is compressed with it; it alone is asked
    after    the context is compressed; then come eight questions, each fed token by token after the answers before it

Both read the same sequence, so `in` asks the first of the questions of the other. Keys are mentioned and asked for by Zipf's
law: a policy that finds the heavy hitters while it reads is rewarded here, and so is one that keeps the newest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import ClassVar

from transformers import PreTrainedModel

from tools.training import tasks

from ..settings import Setting
from .task import Sample, Task, digest
from .together import ROWS_PER_DRAW, Known, feed_answers

QUESTIONS = 8
IN, AFTER = "in", "after"


def ask(index: int) -> dict[str, tasks.Batch]:
    """One sequence in each scenario, [1, T]; where `n` tokens are read at once before the others are fed."""
    after = tasks.recall(random.Random(f"recall 0 {index}"), 1, questions=QUESTIONS, in_prompt=False)
    asked = after.prompt_length + 2  # <q> and the key
    first = tasks.Batch(after.tokens_BT[:, : asked + 3], asked, after.answers_AW[:1])
    return {IN: first, AFTER: after}


class Recall(Task):
    """What most tasks ask; a subclass says under which settings, and in which scenarios."""

    metric = "right"
    metrics: ClassVar[dict[str, str]] = {"right": "share of a sequence's answers that are right in all three values"}
    scenarios: ClassVar[tuple[str, ...]] = (IN, AFTER)

    def samples(self, count: int) -> list[Sample]:
        """`count` sequences in each scenario."""
        made = [(scenario, i, ask(i)[scenario]) for scenario in self.scenarios for i in range(count)]
        return [
            Sample(
                f"{scenario}/{i}", Known(rows, i // ROWS_PER_DRAW), {"scenario": scenario},
                digest(rows.tokens_BT, rows.prompt_length),
            )
            for scenario, i, rows in made
        ]  # fmt: skip

    def run(self, model: PreTrainedModel, setting: Setting, samples: list[Sample]) -> Iterator[dict[str, float]]:
        """Feed the answers."""
        for right_A in feed_answers(model, setting, samples):
            yield {self.metric: right_A.float().mean().item()}
