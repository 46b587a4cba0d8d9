"""Is a budget by mass a better way to spend memory? Beside each a fixed budget of as many tokens.

A setting's `k` is the mass. `snapkv, mass` holds what that takes, `snapkv, as many` in each head the mean of it over heads,
layers and samples. Sizes that are protected are tokens, since a mass gives no size that a share could be of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from transformers import PreTrainedModel

import kvpatch
from kvpatch.evaluation.teacher_forcing import feed
from tools.training.tasks import Batch

from ..settings import Setting
from .recall import IN, Recall
from .task import SMALL, UNPATCHED, Sample, patch, set_policy
from .together import together

OPTIONS: dict[str, dict[str, Any]] = {
    "snapkv": SMALL["snapkv"],
    "h2o": {"recent": 16},
    "roco": {"recent": 10, "protected": 0},
}
MASS, FIXED = "mass", "as many"
HELD = "share of its text that a head holds"


class Mass(Recall):
    """Settings are masses, each followed by the fixed budget of the same mean size."""

    name = "mass"
    metrics: ClassVar[dict[str, str]] = Recall.metrics | {"held": HELD}
    budgets = (0.7, 0.9)
    policies = tuple(OPTIONS)
    scenario = IN

    def settings(self, policies: tuple[str, ...] = ()) -> list[Setting]:
        """Pairs of a mass and as many tokens."""
        return [UNPATCHED] + [
            set_policy(policy, mass, OPTIONS[policy], f"{policy}, {way}")
            for mass in self.budgets
            for policy in policies or self.policies
            for way in (MASS, FIXED)
        ]

    def run(self, model: PreTrainedModel, setting: Setting, samples: list[Sample]) -> Iterator[dict[str, float]]:
        """Measure what the mass holds, then the answers under it, or under as many tokens."""
        if setting == UNPATCHED:
            yield from super().run(model, setting, samples)
            return
        way = replace(setting, k=kvpatch.Mass(setting.k))
        held = count_held(model, way, samples)
        if setting.row.label.endswith(FIXED):
            mean = max(1, round(sum(held) / len(held)))
            way, held = replace(setting, k=mean), [float(mean)] * len(held)
        for one, tokens, sample in zip(super().run(model, way, samples), held, samples, strict=True):
            yield {**one, "held": tokens / count_evictable(setting, sample.data.rows)}


def count_evictable(setting: Setting, rows: Batch) -> int:
    """Tokens that could go: a policy that evicts once keeps what follows the prompt."""
    once = kvpatch.get_policy(setting.row.policy).schedule == "prompt"
    return rows.prompt_length if once else rows.tokens_BT.shape[1] - 1


def count_held(model: PreTrainedModel, way: Setting, samples: list[Sample]) -> list[float]:
    """Tokens that a head holds on average in each sample, without those that nothing evicts."""
    found: list[float] = []
    for batch, draw in together(samples, way):
        ids_BT = batch.tokens_BT[:, :-1]
        with patch(way, model, draw) as patched:
            feed(model, ids_BT, batch.prompt_length)
            held_B = patched.report().held().double().mean((0, 2))
        found += (held_B - (ids_BT.shape[1] - count_evictable(way, batch))).tolist()
    return found
