"""Which values followed a key that a context mentions again and again? Recall of tools/training/tasks.py in three scenarios.

    in       the first question stands in the prompt and is compressed with it; it alone is asked
    after    the context is compressed; then come eight questions, each fed token by token after the answers before it
    stream   as after, but the context is read eight tokens at a time, with eviction after each block

All three read the same sequence, so `in` asks the first of the questions of the others. Keys are mentioned and asked
for by Zipf's law: a policy that finds the heavy hitters while it reads is rewarded here, and so is one that keeps the
newest. What is kept by luck depends on how often a key is mentioned, so there is no line of chance but `random`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from kvpatch.errors import KVPatchError
from tools.training import tasks

from .task import FULL, Request, Sample, Setting, Subject, Task, check_vocabulary, digest
from .together import ROWS_PER_DRAW, Known, feed_answers

QUESTIONS, BLOCK = 8, 8
SCENARIOS = ("in", "after", "stream")


def scenarios(seed: int, index: int) -> dict[str, tasks.Batch]:
    """One sequence in each scenario, [1, T]; where `n` tokens are read at once before the others are fed."""
    after = tasks.recall(random.Random(f"recall {seed} {index}"), 1, questions=QUESTIONS, in_prompt=False)
    asked = after.prompt_length + 2  # <q> and the key
    first = tasks.Batch(after.tokens_BT[:, : asked + 3], asked, after.answers_AW[:1])
    return {"in": first, "after": after, "stream": after}


class Recall(Task):
    name = "recall"
    about = "Values of keys that are mentioned often, asked for before, after and while a context is compressed."
    source = "[CriticalKV 4.2; RoCo 5.3]"
    metric = "right"
    metrics: ClassVar[dict[str, str]] = {"right": "share of a sequence's answers that are right in all three values"}
    budgets = (0.1, 0.3)
    count = 16
    options: ClassVar[dict[str, Any]] = {"scenarios": ",".join(SCENARIOS)}
    scenarios: ClassVar[tuple[str, ...]] = SCENARIOS

    def sequences(self, request: Request, seed: int, index: int) -> dict[str, tasks.Batch]:
        """One sequence, [1, T], in each scenario."""
        return scenarios(seed, index)

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        """`count` sequences in each scenario.

        Raises:
            KVPatchError: the model does not know the words of tools/training/tasks.py, or there is no such scenario.
        """
        wanted = str(self.option(request, "scenarios")).split(",")
        if not set(wanted) <= set(self.scenarios):
            raise KVPatchError(f"-o scenarios={','.join(wanted)}: they are {', '.join(self.scenarios)}.")
        check_vocabulary(subject, self.models[0])
        made = [(i, self.sequences(request, seed, i)) for i in range(request.count or self.count)]
        return [
            Sample(
                f"{scenario}/{i}",
                batches[scenario].prompt_length,
                Known(batches[scenario], i // ROWS_PER_DRAW),
                {"scenario": scenario},
                digest(batches[scenario].tokens_BT, batches[scenario].prompt_length),
            )
            for scenario in self.scenarios
            if scenario in wanted
            for i, batches in made
        ]

    def run(
        self,
        subject: Subject,
        setting: Setting,
        samples: list[Sample],
        request: Request,
        seed: int,
    ) -> Iterator[dict[str, Any]]:
        for scenario in self.scenarios:  # samples are in this order
            here = [sample for sample in samples if sample.group["scenario"] == scenario]
            way = setting
            if scenario == "stream" and setting.policy != FULL.policy:
                way = replace(setting, options={"block": BLOCK, **setting.options})
            for _, right_A in feed_answers(subject, way, here, request.batch, seed):
                yield {self.metric: right_A.float().mean().item()}
