"""What a task is: which settings it tries, on which samples, and what it measures of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers import PreTrainedModel

import kvpatch
from tools.training.train import SHIPPED

from ..settings import FULL, Row, Setting

FIFTEEN = tuple(name for name, (recipe, _) in SHIPPED.items() if recipe in ("llama", "mistral", "mpt", "gptj", "gpt2"))
"""Three training seeds of each architecture that learned tools/training/tasks.py."""
SNAPKV: dict[str, Any] = {"window": 8, "kernel": 5}
SMALL: dict[str, dict[str, Any]] = dict.fromkeys(("snapkv", "critical_snapkv", "adakv", "critical_adakv"), SNAPKV)
"""Options for prompts of some two hundred tokens, where an observation window of 32 would fill a small budget."""
UNPATCHED = Setting(Row(FULL, FULL), 1.0)


def set_policy(policy: str, k: Any, options: dict[str, Any] | None = None, label: str = "") -> Setting:
    """A policy at a budget. options: the policy's own, and those of kvpatch.patched: schedule, block, positions."""
    return Setting(Row(label or policy, policy, options or {}), k)


def add_options(setting: Setting, **options: Any) -> Setting:
    """The same under more options, which do not change its key in a file: measure with it, and name the first."""
    return replace(setting, row=replace(setting.row, options=setting.row.options | options))


def patch(setting: Setting, model: Any, seed: int = 0) -> AbstractContextManager[Any]:
    """Put the model under a setting; `UNPATCHED` is the model as it is."""
    if setting == UNPATCHED:
        return nullcontext()
    return kvpatch.patched(model, setting.row.policy, setting.k, seed=seed, **setting.row.options)


def tell_length(setting: Setting, new: int) -> Setting:
    """Tell what generate() would tell a policy whose temperature rises with the new tokens, where they are fed instead."""
    name = "generation_length"
    if setting == UNPATCHED or name in setting.row.options or name not in kvpatch.get_policy(setting.row.policy).options():
        return setting
    return add_options(setting, **{name: new})


@dataclass(frozen=True)
class Sample:
    """A unit of evidence, such as a sequence: what intervals are drawn over.

    name: unique within a task and model. data: what the task needs. digest: of the content, so that lines of another text are
    never taken for this one's.
    """

    name: str
    data: Any
    digest: str


class Task:
    """A subclass says what its samples are and measures them.

    metric: the headline among what `run` yields. policies, budgets, models, count (samples of a model): those of the page.
    """

    name: ClassVar[str]
    source: ClassVar[str] = ""
    metric: ClassVar[str]
    metrics: ClassVar[dict[str, str]]
    """Every metric that `run` yields and what it is, in words."""
    models: ClassVar[tuple[str, ...]] = FIFTEEN
    policies: ClassVar[tuple[str, ...]]
    budgets: ClassVar[tuple[Any, ...]]
    count: ClassVar[int] = 24

    def settings(self, policies: tuple[str, ...] = ()) -> list[Setting]:
        """In the order in which they run, `UNPATCHED` first. policies: these in place of the task's own."""
        raise NotImplementedError

    def samples(self, count: int) -> list[Sample]:
        """The same for the same number, always."""
        raise NotImplementedError

    def run(self, model: PreTrainedModel, setting: Setting, samples: list[Sample]) -> Iterator[dict[str, float]]:
        """Yield a dict per sample, in order: numbers by metric. Raises KVPatchError where the setting cannot run."""
        raise NotImplementedError
