"""A learner's pass: forward and backward over a text that follows a record, beside the same with full attention."""

import gc
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvpatch

from .lines import REPLAY_ARCH, Line, record, settings
from .memory import apart, measure_growth, return_freed_memory
from .models import build, timed, tokens
from .prompt import summary


def recorded(model: PreTrainedModel, policy: str, ids: Tensor) -> kvpatch.Record:
    """The record of a text that was read in small blocks under a budget, as generating it would: most of its tokens die."""
    with torch.no_grad(), kvpatch.patched(model, policy, record=True, **settings("replay")) as patch:
        return patch.record(model(ids, use_cache=True, logits_to_keep=1).past_key_values)


def learn(model: PreTrainedModel, ids: Tensor, followed: kvpatch.Record | None) -> float:
    """CPU time in ms of a loss and its gradients, in a replay or with full attention."""
    with torch.enable_grad(), nullcontext() if followed is None else kvpatch.replay(model, followed):
        _, seconds = timed(lambda: model(ids, labels=ids, use_cache=False).loss.backward())
    model.zero_grad(set_to_none=False)
    return 1000 * seconds


def peak_growth(policy: str | None, n: int, tiny: bool) -> int:
    """Bytes by which such a pass raises the peak resident size; policy None: with full attention. Call it in a new process."""
    torch.set_num_threads(1)
    return_freed_memory()
    model = build(REPLAY_ARCH, n, tiny)
    ids = tokens(model, n)
    followed = None if policy is None else recorded(model, policy, ids)
    learn(model, ids[:, :16], followed)
    return measure_growth(lambda: learn(model, ids, followed))


def replay_lines(policies: Iterable[str], n: int, repeats: int, tiny: bool, memory: bool = True) -> Iterable[Line]:
    """One line per policy: passes with full attention and in a replay in turns, and peak memory where `memory` is wanted."""
    model = build(REPLAY_ARCH, n, tiny)
    ids = tokens(model, n)
    for policy in policies:
        followed, pairs = recorded(model, policy, ids), []
        for _ in range(repeats + 1):
            gc.collect()
            pairs.append((learn(model, ids, None), learn(model, ids, followed)))
        figures = summary(pairs[1:]) | {"record_bytes": followed.nbytes, "first": int(followed.first_N.min())}
        if memory:
            dense, mine = (apart(peak_growth, one, n, tiny) for one in (None, policy))
            figures |= {"bytes_unpatched": dense, "bytes": mine, "memory_ratio": mine / max(dense, 1)}
        yield record("replay", REPLAY_ARCH, policy, n, repeats, model, figures)
