"""Which policy for questions that come later? Recall's, after compression, under policies made for them and the best others.

`kvzip` repeats the context behind <rec>, which is how these models were taught to copy. `learned` learns from `kvzip_plus`, on
contexts of the same kind that no sample has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import kvpatch
from kvpatch.evaluation.calibrate import calibrate
from kvpatch.policies.calibration import Calibration
from tools.training import tasks
from tools.training.tasks import COPY

from .recall import Recall
from .task import FULL, SMALL, Request, Sample, Setting, Subject

REPEAT: dict[str, Any] = {"instruction": (COPY,)}
WAYS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("kvzip", REPEAT, ""),
    ("kvzip", REPEAT | {"floor": 0.2}, "kvzip, floor 0.2"),
    ("kvzip", REPEAT | {"chunk": 32}, "kvzip, chunk 32"),
    ("kvzip", REPEAT | {"chunk": 32, "floor": 0.2}, "kvzip, chunk 32, floor 0.2"),
    ("kvzip_plus", REPEAT, ""),
    ("kvzip_plus", REPEAT | {"floor": 0.5}, "kvzip_plus, floor 0.5"),
    ("learned", {}, ""),
    ("layer_defensive", {"window": 8}, ""),
    ("defensive_snapkv", {"window": 8}, ""),
    ("expected_attention", {}, ""),
    ("roco", {}, ""),
    ("keyformer", {}, ""),
    ("h2o", {}, ""),
    ("snapkv", SMALL["snapkv"], ""),
    ("window", {}, ""),
    ("random", {}, ""),
)


TEXTS = 64
"""Contexts that `learned` learns from."""


def taught(subject: Subject) -> Calibration:
    """What `learned` learns on a model: always of the same contexts."""
    texts = tasks.recall(random.Random("learned"), TEXTS, questions=1).prompt_BT.to(subject.model.device)
    return calibrate(subject.model, texts.split(1), teacher=kvpatch.get_policy("kvzip_plus").with_options(**REPEAT))


class Later(Recall):
    name = "later"
    about = "Questions after compression: policies that were made for them beside the best others."
    source = "[KVzip; DefensiveKV; Expected Attention]"
    budgets = (0.2, 0.4)
    policies = tuple(dict.fromkeys(policy for policy, _, _ in WAYS))
    options: ClassVar[dict[str, Any]] = Recall.options | {"scenarios": "after"}

    def settings(self, request: Request, subject: Subject) -> list[Setting]:
        asked = request.policies or self.policies
        own = [way for way in WAYS if way[0] in asked]
        own += [(policy, SMALL.get(policy, {}), "") for policy in asked if policy not in self.policies]
        budgets = request.budgets or self.budgets
        return [FULL, *(Setting(policy, k, options, label) for k in budgets for policy, options, label in own)]

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        if setting.policy == "learned":
            setting = replace(setting, options=setting.options | {"calibration": taught(subject)})
        yield from super().run(subject, setting, samples, request, seed)
