"""What a task is: which settings it tries, on which samples, and what it measures of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvpatch
from kvpatch.errors import KVPatchError

FIVE = ("llama-0", "mistral-0", "mpt-0", "gptj-0", "gpt2-0")
"""The shipped models that learned tools/training/tasks.py, one of each architecture."""
PYTHON = "llama-python"
"""The recipe of the models of Python source."""
WALKS = "llama-walks"
"""The recipe of the models that learned tools/training/walks.py."""
POLICIES = (
    "random",
    "window",
    "streaming_llm",
    "scissorhands",
    "h2o",
    "tova",
    "roco",
    "keyformer",
    "snapkv",
    "critical_snapkv",
)
POLICIES += ("adakv", "critical_adakv")
SMALL: dict[str, dict[str, Any]] = {
    name: {"window": 8, "kernel": 5}
    for name in ("snapkv", "critical_snapkv", "adakv", "critical_adakv", "pyramidkv", "critical_pyramidkv")
}
SMALL |= {"dropkv": SMALL["snapkv"], "chunk_kv": SMALL["snapkv"] | {"size": 8}, "lag_kv": {"lag": 32}}
"""Options for prompts of some two hundred tokens, where an observation window of 32 would fill a small budget."""


@dataclass(frozen=True)
class Setting:
    """One way to run a model. `options` are those of kvpatch.patched: the policy's own, schedule, block, positions.

    label: its name in tables and pictures, where it is not the policy's.
    """

    policy: str
    k: Any = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.policy

    @cached_property
    def key(self) -> str:
        return json.dumps([self.name, self.policy, self.k, self.options], sort_keys=True)

    def patched(self, model: Any, seed: int = 0) -> AbstractContextManager[Any]:
        """The model under this setting; `full` is the model as it is, unpatched."""
        if self.policy == "full":
            return nullcontext()
        return kvpatch.patched(model, self.policy, self.k, seed=seed, **self.options)

    def told(self, new: int) -> Setting:
        """What generate() would tell a policy whose temperature rises with the new tokens, where they are fed instead."""
        name = "generation_length"
        if self.policy == "full" or name in self.options or name not in kvpatch.get_policy(self.policy).options():
            return self
        return replace(self, options=self.options | {name: new})


FULL = Setting("full")


@dataclass(frozen=True)
class Sample:
    """One independent unit of evidence, such as a sequence: what intervals are drawn over.

    name: unique within a task, model and seed. group: what tables and pictures split by, such as {"scenario": "after"}.
    n: tokens of its prompt. data: whatever the task needs. digest: of the content, so that results of other samples are
    never taken for these.
    """

    name: str
    n: int
    data: Any
    group: dict[str, Any]
    digest: str


def digest(*parts: Any) -> str:
    """Eight characters for the content of a sample; tensors as lists."""
    plain = [part.tolist() if hasattr(part, "tolist") else part for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:8]


@dataclass
class Subject:
    """A model under evaluation. `recipe`: what it was trained by where it is one of ours ("llama"), else its name."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    recipe: str
    synthetic: bool
    """Whether it learned tools/training/tasks.py."""

    @property
    def python(self) -> bool:
        """Whether it is one of ours that read Python's library."""
        return self.recipe == PYTHON


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line; None leaves it to the task."""

    models: tuple[str, ...] | None = None
    policies: tuple[str, ...] | None = None
    budgets: tuple[Any, ...] | None = None
    count: int | None = None
    seeds: int = 1
    batch: int = 32
    data: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """The task's own, from -o name=value; `Task.options` has the defaults."""
    dtype: str = "auto"
    device: str = "auto"
    out: Path = Path("out/evaluate")


class Task:
    """A row of the table in tasks.py. A subclass says what its samples are and measures them.

    metric: the headline among what `run` yields. better: "higher", "lower", or "" where it is a finding about the model.
    policies, budgets, models, count (samples of a model and seed), options: the defaults.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    source: ClassVar[str] = ""
    metric: ClassVar[str]
    metrics: ClassVar[dict[str, str]]
    """Every metric that `run` yields and what it is, in words."""
    better: ClassVar[str] = "higher"
    models: ClassVar[tuple[str, ...]] = FIVE
    policies: ClassVar[tuple[str, ...]] = POLICIES
    budgets: ClassVar[tuple[Any, ...]] = (0.1, 0.2, 0.3, 0.5, 0.7)
    count: ClassVar[int] = 32
    options: ClassVar[dict[str, Any]] = {}
    split: ClassVar[tuple[str, ...]] = ("scenario",)
    """The parts of `Sample.group` that tables and pictures keep apart; means are over the rest."""

    def settings(self, request: Request, subject: Subject) -> list[Setting]:
        """In the order in which they run, `FULL` first."""
        small = SMALL if subject.synthetic or subject.python else {}
        chosen = [name for name in request.policies or self.policies if name != "full"]
        budgets = request.budgets or self.budgets
        return [FULL, *(Setting(name, k, small.get(name, {})) for k in budgets for name in chosen)]

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        """The same for the same arguments, always."""
        raise NotImplementedError

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        """Yield a dict per sample, in order: numbers by metric, and "text" where text was generated.

        Raises KVPatchError where the setting cannot run.
        """
        raise NotImplementedError

    def chance(self, k: Any, group: dict[str, Any]) -> float | None:
        """What the headline would be by luck at this budget: a line in every picture. None where that is not known."""
        return None

    def pictures(self, table: Any, out: Path) -> None:
        """More pictures than the curves that every task gets; `table` is a table.Table of its lines."""

    def option(self, request: Request, name: str) -> Any:
        return request.options.get(name, self.options[name])


def batches(samples: list[Sample], size: int) -> Iterator[list[Sample]]:
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def check_vocabulary(subject: Subject, known: str) -> None:
    """Raise KVPatchError for a model that was not trained on the words of tools/training/tasks.py; `known` was."""
    if not subject.synthetic:
        raise KVPatchError(f"{subject.name} does not know the words of tools/training/tasks.py: give --models {known}.")
