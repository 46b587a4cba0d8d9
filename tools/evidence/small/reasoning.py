"""Long reasoning: a trace of hundreds of tokens, each of which needs earlier ones. The walks of tools/training/walks.py,
evicted all along.

A budget is a share of prompt and trace together, and no head ever holds more, whichever way a policy is run:

    every token    eviction takes one token at a time, from prompt and trace alike
    prompt kept    schedule="decode": only the trace is evicted, and has what the prompt leaves of the budget
    every m        eviction takes m tokens at once, so that a head is down to m - 1 tokens less than the budget each time

The true trace is fed, token by token: which visits would be right?
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

from transformers import PreTrainedModel

from kvpatch import get_policy
from kvpatch.errors import KVPatchError
from kvpatch.evaluation.calibrate import calibrate
from kvpatch.evaluation.teacher_forcing import feed
from kvpatch.policies.needs import Calibrated
from tools.training import walks

from ..samples import digest
from ..settings import Setting
from .task import UNPATCHED, Sample, Task, add_options, patch, set_policy, tell_length
from .together import ROWS_PER_DRAW, Known, together

KEPT = "prompt kept"
RHYTHMS: dict[str, int] = {"every token": 1, KEPT: 1, "every 32": 32, "every 128": 128}
"""How policies are run, and how many tokens an eviction takes."""

OWN: dict[str, dict[str, Any]] = {"lazy": {"recent": 32}, "vase": {"window": 32}}
"""Windows for a trace of some hundred tokens; those of the papers are for many thousands."""

CALIBRATES = 4
"""Walks that a calibration is of: others than the samples, and as long."""


def share_right(guessed: Sequence[int], trace: Sequence[int]) -> float:
    """The share of a trace's visits of which every token is guessed."""
    whole = [guessed[start:stop] == trace[start:stop] for start, stop in pairwise([0, *walks.visits(trace)])]
    return sum(whole) / len(whole)


class Reasoning(Task):
    """Every policy in every way that it has; k is the budget of prompt and trace."""

    name = "reasoning"
    source = "[R-KV; RaaS; LazyEviction; VaSE]"
    metric = "visits"
    metrics: ClassVar[dict[str, str]] = {"visits": "share of a walk's visits that are right when the true trace is fed"}
    models = ("llama-walks-0",)
    policies = (
        "random", "window", "streaming_llm", "h2o", "scissorhands", "tova", "roco", "keyformer", "key_norm", "key_diff", "cur",
        "raas", "lazy", "r_kv", "tri_attention", "vase",
    )  # fmt: skip
    budgets = (0.3, 0.5)
    count = 12

    def settings(self, policies: tuple[str, ...] = ()) -> list[Setting]:
        """Each policy, way by way."""
        return [UNPATCHED, *(
            set_policy(name, k, OWN.get(name, {}) | {"schedule": schedule, "every": RHYTHMS[way]}, f"{name}, {way}")
            for k in self.budgets
            for name in policies or self.policies
            for way in RHYTHMS
            for schedule in (find_schedule(name, way),)
            if schedule is not None
        )]  # fmt: skip

    def samples(self, count: int) -> list[Sample]:
        """`count` walks."""
        made = [walks.walk(random.Random(f"reasoning 0 {i}"), 1) for i in range(count)]
        return [
            Sample(str(i), Known(rows, i // ROWS_PER_DRAW), digest(rows.prompt_BT[0], rows.continuation_BT[0]))
            for i, rows in enumerate(made)
        ]

    def run(self, model: PreTrainedModel, setting: Setting, samples: list[Sample]) -> Iterator[dict[str, float]]:
        """Feed the traces."""
        for batch, draw in together(samples, setting):
            n, new = batch.prompt_length, batch.continuation_BT.shape[1]
            own = calibrate_setting(limit_tokens(setting, n, new), model)
            with patch(tell_length(own, new), model, draw):
                fed = feed(model, batch.tokens_BT[:, :-1], n)
            for guessed, trace in zip(fed.logits_BSV.argmax(-1).tolist(), batch.continuation_BT.tolist(), strict=True):
                yield {"visits": share_right(guessed, trace)}


def find_schedule(name: str, way: str) -> str | None:
    """decode where the prompt is kept, in this way or always; else both. None: the policy has no such way."""
    policy = get_policy(name)
    schedules = policy.score.schedules
    if policy.every > 1 and RHYTHMS[way] == 1:  # its authors evict many at once, and its score is too dear for every step
        return None
    if way == KEPT or "both" not in schedules:
        return "decode" if "decode" in schedules and way != "every token" else None
    return "both"


def calibrate_setting(setting: Setting, model: PreTrainedModel) -> Setting:
    """The setting with a calibration of true traces, if its policy needs one."""
    if setting == UNPATCHED or not get_policy(setting.row.policy).needs.find(Calibrated):
        return setting
    pieces = [walks.walk(random.Random(f"calibration {i}"), 1).tokens_BT for i in range(CALIBRATES)]
    return add_options(setting, calibration=calibrate(model, pieces))


def limit_tokens(setting: Setting, n: int, new: int) -> Setting:
    """The setting in tokens of this text: the budget less what its rhythm adds, and less the prompt where that is kept.

    Raises:
        KVPatchError: too little is left.
    """
    if setting == UNPATCHED:
        return setting
    row, total = setting.row, int(setting.k * (n + new))
    k = total - row.options["every"] + 1 - (n if row.options["schedule"] == "decode" else 0)
    if k < 1 + OWN.get(row.policy, {}).get("recent", 0):
        raise KVPatchError(f"a budget of {total} tokens leaves {k}, too few: give a larger one.")
    return replace(setting, k=k)
