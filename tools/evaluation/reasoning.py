"""Long reasoning: a trace of hundreds of tokens, each of which needs earlier ones. The walks of tools/training/walks.py,
written greedily, and evicted all along.

A budget is a share of prompt and trace together, and no head ever holds more, whichever way a policy is run:

    every token    eviction takes one token at a time, from prompt and trace alike
    prompt kept    schedule="decode": only the trace is evicted, and has what the prompt leaves of the budget
    every m        eviction takes m tokens at once, so that a head is down to m - 1 tokens less than the budget each time

Each walk is written twice. First the true trace is fed, token by token: which visits would be right? Then what the model writes
is fed back, so that a mistake stays in the text: how many visits come before the first one, and does the text end in a loop,
the same words over and over (VaSE says that the loss of values of large range does that)?
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch

from kvpatch import get_policy
from kvpatch.errors import KVPatchError
from kvpatch.evaluation.calibrate import calibrate
from kvpatch.evaluation.teacher_forcing import feed
from kvpatch.policies.needs import Calibrated
from tools.training import walks

from .greedy import Tokens, generate, number
from .task import FULL, WALKS, Request, Sample, Setting, Subject, Task, digest
from .together import ROWS_PER_DRAW, seed_of, together

KEPT = "prompt kept"
RHYTHMS: dict[str, int] = {"every token": 1, KEPT: 1, "every 32": 32, "every 128": 128}
"""How policies are run, and how many tokens an eviction takes."""

OWN: dict[str, dict[str, Any]] = {"lazy": {"recent": 32}, "vase": {"window": 32}}
"""Windows for a trace of some hundred tokens; those of the papers are for many thousands."""

CALIBRATES = 4
"""Walks that a calibration is of: others than the samples, and as long."""

REPEATS, LOOP = 3, 12
"""A text loops whose end is the same words three times in a row, and these are twelve tokens or more together."""


def loops(tokens: Sequence[int]) -> bool:
    """Whether the end of a text says the same over and over: `9 1 2 3 4 1 2 3 4 1 2 3 4` does, `1 2 3 4 1 2 3 4` does not."""
    for period in range(1, len(tokens) // REPEATS + 1):
        span = period * max(REPEATS, -(-LOOP // period))
        if span <= len(tokens) and all(tokens[-i] == tokens[-i - period] for i in range(1, span - period + 1)):
            return True
    return False


def share_right(guessed: Sequence[int], trace: Sequence[int]) -> float:
    """The share of a trace's visits of which every token is guessed."""
    whole = [guessed[start:stop] == trace[start:stop] for start, stop in pairwise([0, *walks.visits(trace)])]
    return sum(whole) / len(whole)


def score(written: Sequence[int], trace: Sequence[int]) -> dict[str, Any]:
    """What `Reasoning` measures of a text that should be `trace`."""
    same = next((i for i, (a, b) in enumerate(zip(written, trace, strict=False)) if a != b), min(len(written), len(trace)))
    ends = walks.visits(trace)
    reached = sum(end <= same for end in ends) / len(ends)
    return {"reached": reached, "traces": list(written) == list(trace), "loops": loops(written)}


@dataclass(frozen=True)
class Asked:
    """A prompt and the trace that should follow. draw: see together.py. graph: its nodes, and exits of each."""

    ids: Tokens
    trace: Tokens
    draw: int
    graph: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """What rows must share to be written together."""
        return len(self.ids), len(self.trace)


class Reasoning(Task):
    name = "reasoning"
    about = "Traces of hundreds of tokens that need earlier steps, evicted while they are written."
    source = "[R-KV; RaaS; LazyEviction; VaSE]"
    metric = "visits"
    metrics: ClassVar[dict[str, str]] = {
        "visits": "share of a walk's visits that are right when the true trace is fed",
        "reached": "share of a walk's visits before the first mistake, when what is written is fed",
        "traces": "share of traces without a mistake",
        "loops": "share of traces that end in a loop",
    }
    models = (f"{WALKS}-0",)
    policies = (
        "random", "window", "streaming_llm", "h2o", "scissorhands", "tova", "roco", "keyformer", "key_norm", "key_diff", "cur",
        "raas", "lazy", "r_kv", "tri_attention", "vase",
    )  # fmt: skip
    budgets = (0.35, 0.5)
    count = 24
    options: ClassVar[dict[str, Any]] = {"nodes": walks.NODES, "exits": walks.EXITS, "ways": ",".join(RHYTHMS)}

    def settings(self, request: Request, subject: Subject) -> list[Setting]:
        """Every policy in every way that it has; k is the budget of prompt and trace.

        Raises:
            KVPatchError: there is no such way.
        """
        ways = str(self.option(request, "ways")).split(",")
        if not set(ways) <= set(RHYTHMS):
            raise KVPatchError(f"-o ways={','.join(ways)}: they are {', '.join(RHYTHMS)}.")
        names = [name for name in request.policies or self.policies if name != FULL.policy]
        return [FULL, *(
            Setting(name, k, OWN.get(name, {}) | {"schedule": schedule, "every": RHYTHMS[way]}, f"{name}, {way}")
            for k in request.budgets or self.budgets
            for name in names
            for way in ways
            for schedule in (self._schedule(name, way),)
            if schedule is not None
        )]  # fmt: skip

    def _schedule(self, name: str, way: str) -> str | None:
        """decode where the prompt is kept, in this way or always; else both. None: the policy has no such way."""
        policy = get_policy(name)
        schedules = policy.score.schedules
        if policy.every > 1 and RHYTHMS[way] == 1:  # its authors evict many at once, and its score is too dear for every step
            return None
        if way == KEPT or "both" not in schedules:
            return "decode" if "decode" in schedules and way != "every token" else None
        return "both"

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        """`count` walks.

        Raises:
            KVPatchError: the model has not learned to walk, or has no position for so many tokens.
        """
        if subject.recipe != WALKS:
            raise KVPatchError(f"{subject.name} has not learned tools/training/walks.py: give --models {self.models[0]}.")
        nodes, exits = (number(self, request, name, walks.NODES) for name in ("nodes", "exits"))
        try:
            drawn = (random.Random(f"reasoning {seed} {i}") for i in range(request.count or self.count))
            made = [walks.walk(rng, 1, nodes=nodes, exits=exits) for rng in drawn]
        except ValueError as error:
            raise KVPatchError(f"-o {error}.") from error
        n, most = made[0].tokens_BT.shape[1], subject.model.config.max_position_embeddings
        if n > most:
            raise KVPatchError(f"nodes={nodes}, exits={exits}: a walk has {n} tokens, and {subject.name} has {most} positions.")
        rows = [(batch.prompt_BT[0].tolist(), batch.continuation_BT[0].tolist()) for batch in made]
        return [
            Sample(str(i), n, Asked(ids, trace, i // ROWS_PER_DRAW, (nodes, exits)), {}, digest(ids, trace))
            for i, (ids, trace) in enumerate(rows)
        ]

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        for part, draw in together(samples, request.batch, setting):
            own = calibrated(held(setting, *part[0].data.shape), subject, part[0].data.graph)
            n, new = part[0].data.shape
            tokens_BT = torch.tensor([sample.data.ids + sample.data.trace for sample in part])[:, :-1]
            with own.told(new).patched(subject.model, seed_of(seed, draw)):
                fed = feed(subject.model, tokens_BT.to(subject.model.device), n)
            guesses = fed.logits_BSV.argmax(-1).tolist()
            with own.patched(subject.model, seed_of(seed, draw)):
                texts = generate(subject, [sample.data.ids for sample in part], new)
            for sample, guessed, written in zip(part, guesses, texts, strict=True):
                yield {"visits": share_right(guessed, sample.data.trace), **score(written, sample.data.trace)}


def calibrated(setting: Setting, subject: Subject, graph: tuple[int, int]) -> Setting:
    """The setting with a calibration of true traces, if its policy needs one."""
    if setting.policy == FULL.policy or not get_policy(setting.policy).needs.find(Calibrated):
        return setting
    rngs = (random.Random(f"calibration {i}") for i in range(CALIBRATES))
    pieces = [walks.walk(rng, 1, nodes=graph[0], exits=graph[1]).tokens_BT.to(subject.model.device) for rng in rngs]
    return replace(setting, options=setting.options | {"calibration": calibrate(subject.model, pieces)})


def held(setting: Setting, n: int, new: int) -> Setting:
    """The setting in tokens of this text: the budget less what its rhythm adds, and less the prompt where that is kept.

    Raises:
        KVPatchError: too little is left.
    """
    if setting.policy == FULL.policy:
        return setting
    total = setting.k if isinstance(setting.k, int) else int(setting.k * (n + new))
    k = total - setting.options["every"] + 1 - (n if setting.options["schedule"] == "decode" else 0)
    if k < 1 + OWN.get(setting.policy, {}).get("recent", 0):
        raise KVPatchError(f"a budget of {total} tokens leaves {k}, too few: give a larger one.")
    return replace(setting, k=k)
