"""Where the time of a prompt or of generated tokens goes."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

import kvpatch

from .lines import BATCH, K
from .models import build, forward, tokens, twin


def profile(title: str, run: Callable[[], object]) -> None:
    """The 15 operations of `run` that take most CPU time themselves."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    print(title)
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60))


def feed(model: PreTrainedModel, ids: Tensor, past: Cache) -> None:
    """One forward per token."""
    for one in ids.split(1, dim=1):
        forward(model, one, past)


def profile_case(case: str, arch: str, policy: str, n: int, tiny: bool, steps: int = 16) -> None:
    """Where the time of one prompt or of `steps` decode steps goes, unpatched and patched."""
    model = build(arch, n, tiny)
    ids, other = tokens(model, n + steps, BATCH if case == "batch" else 1), twin(model)
    with kvpatch.patched(other, policy, k=K):
        for name, one in (("unpatched", model), (policy, other)):
            past = forward(one, ids[:, :n])[0]
            if case not in ("decode", "host", "batch"):
                profile(f"{case} {arch} {n}: {name}", partial(forward, one, ids[:, :n]))
                continue
            forward(one, ids[:, n : n + 1], past)
            profile(f"{case} {n}, {steps - 1} steps: {name}", partial(feed, one, ids[:, n + 1 : n + steps], past))
