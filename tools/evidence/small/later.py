"""Which policy for questions that come later? Recall's, after compression, under policies made for them and the best others.

`kvzip` repeats the context after <rec>, which is how these models were taught to copy. `learned` learns from `kvzip_plus`, on
contexts of the same kind that no sample has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

import kvpatch
from kvpatch.evaluation.calibrate import calibrate
from kvpatch.policies.calibration import Calibration
from tools.training import tasks
from tools.training.tasks import COPY

from ..settings import Setting
from .recall import AFTER, Recall
from .task import SMALL, UNPATCHED, Sample, add_options, set_policy

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


def teach(model: PreTrainedModel) -> Calibration:
    """What `learned` learns on a model: always of the same contexts."""
    texts = tasks.recall(random.Random("learned"), TEXTS, questions=1).prompt_BT
    return calibrate(model, texts.split(1), teacher=kvpatch.get_policy("kvzip_plus").with_options(**REPEAT))


class Later(Recall):
    """Other policies may be asked for beside these."""

    name = "later"
    source = "[KVzip; DefensiveKV; Expected Attention]"
    budgets = (0.2, 0.4)
    policies = tuple(dict.fromkeys(policy for policy, _, _ in WAYS))
    scenario = AFTER

    def settings(self, policies: tuple[str, ...] = ()) -> list[Setting]:
        """Each way at each budget."""
        asked = policies or self.policies
        own = [way for way in WAYS if way[0] in asked]
        own += [(policy, SMALL.get(policy, {}), "") for policy in asked if policy not in self.policies]
        return [UNPATCHED, *(set_policy(policy, k, options, label) for k in self.budgets for policy, options, label in own)]

    def run(self, model: PreTrainedModel, setting: Setting, samples: list[Sample]) -> Iterator[dict[str, float]]:
        """Teach `learned` before."""
        if setting.row.policy == "learned":
            setting = add_options(setting, calibration=teach(model))
        yield from super().run(model, setting, samples)
