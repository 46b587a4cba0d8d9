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

from ..samples import digest
from ..settings import Setting
from .task import Sample, Task
from .together import ROWS_PER_DRAW, Known, feed_answers

QUESTIONS = 8
IN, AFTER = "in", "after"


def ask(scenario: str, index: int) -> tasks.Batch:
    """A sequence as the scenario asks of it, [1, T]."""
    after = tasks.recall(random.Random(f"recall 0 {index}"), 1, questions=QUESTIONS, in_prompt=False)
    if scenario == AFTER:
        return after
    asked = after.prompt_length + 2  # <q> and the key
    return tasks.Batch(after.tokens_BT[:, : asked + 3], asked, after.answers_AW[:1])


class Recall(Task):
    """What most tasks ask; a subclass says under which settings, and in which scenario."""

    metric = "right"
    metrics: ClassVar[dict[str, str]] = {"right": "share of a sequence's answers that are right in all three values"}
    scenario: ClassVar[str]

    def samples(self, count: int) -> list[Sample]:
        """`count` sequences."""
        every = [ask(self.scenario, i) for i in range(count)]
        return [
            Sample(f"{self.scenario}/{i}", Known(rows, i // ROWS_PER_DRAW), digest(rows.tokens_BT, rows.prompt_length))
            for i, rows in enumerate(every)
        ]

    def run(self, model: PreTrainedModel, setting: Setting, samples: list[Sample]) -> Iterator[dict[str, float]]:
        """Feed the answers."""
        for right_A in feed_answers(model, setting, samples):
            yield {self.metric: right_A.float().mean().item()}
