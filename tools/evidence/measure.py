"""Measure one sample under all settings.

A prompt is read with full attention whatever the policy, and evicted at its end. So the products of its tokens with the model's
weights, nine tenths of its cost, are the same under all policies: they are computed once, by the unpatched model, and handed to
the passes of the others, which compute attention, statistics and evictions. Passes after the first compute everything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvpatch
from kvpatch.arch.upstream import cache_argument, cache_of

from .samples import Probe, Sample
from .settings import Setting

SEED = 0
UNREAD = 4  # tokens of a prompt that say nothing of it: what a model knows without the text


@dataclass
class Shared:
    """Outputs of the decoder's linear layers in one pass over a prompt."""

    outputs: dict[str, Tensor]

    @classmethod
    @contextmanager
    def record(cls, decoder: nn.Module) -> Iterator[Shared]:
        """Take down the outputs of the passes inside the block."""
        shared = cls({})
        with ExitStack() as stack:
            for name, module in _linear_layers(decoder):

                def keep(_: nn.Module, __: Any, output: Tensor, name: str = name) -> None:
                    shared.outputs[name] = output

                stack.callback(module.register_forward_hook(keep).remove)
            yield shared

    @contextmanager
    def replayed(self, decoder: nn.Module) -> Iterator[None]:
        """Give each linear layer's first call its recorded output; a second reading of the prompt computes its own."""
        left = dict(self.outputs)
        with ExitStack() as stack:
            for name, module in _linear_layers(decoder):

                def forward(x: Tensor, name: str = name, module: nn.Module = module) -> Tensor:
                    known = left.pop(name, None)
                    if known is None:
                        return type(module).forward(module, x)
                    if known.shape[:-1] != x.shape[:-1]:
                        raise AssertionError(f"{name} reads {tuple(x.shape)}, the prompt was recorded as {tuple(known.shape)}")
                    return known

                stack.enter_context(mock.patch.object(module, "forward", forward))
            yield


def _linear_layers(decoder: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in decoder.named_modules() if type(module) is nn.Linear]


@dataclass(frozen=True)
class Judged:
    """How a probe's answer was predicted. nats: per token; right: every token was the likeliest; kl: from the full cache."""

    kind: str
    nats: float
    right: float
    kl: float
    agree: float


def read_rows(model: Any, ids_BN: Tensor, cache: Any, last: int = 1) -> tuple[Tensor, Any]:
    """Read ids on top of a cache; return the logits of the last ones [B,last,V] and the cache."""
    name = cache_argument(type(model).forward)
    out = model(ids_BN, use_cache=True, logits_to_keep=last, **({} if cache is None else {name: cache}))
    return out.logits, cache_of(out)


def read_ids(model: Any, ids: tuple[int, ...], cache: Any, last: int = 1) -> tuple[Tensor, Any]:
    """Read one row of ids; return the logits of the last ones [last,V] and the cache."""
    logits_1LV, cache = read_rows(model, torch.tensor([ids]), cache, last)
    return logits_1LV[0], cache


def judge(model: Any, probe: Probe, cache: Any, full_AV: Tensor | None) -> tuple[Judged, Tensor]:
    """Read a probe; return its judgement and its answer's log probabilities [A,V]."""
    logits_AV, _ = read_ids(model, (probe.lead + probe.answer)[:-1], cache, len(probe.answer))
    logp_AV = logits_AV.float().log_softmax(-1)
    answer_A = torch.tensor(probe.answer)
    nats = F.nll_loss(logp_AV, answer_A).item()
    right = float((logp_AV.argmax(-1) == answer_A).all())
    kl = agree = 0.0
    if full_AV is not None:
        kl = F.kl_div(logp_AV, full_AV, log_target=True, reduction="batchmean").item()
        agree = (logp_AV.argmax(-1) == full_AV.argmax(-1)).float().mean().item()
    return Judged(probe.kind, nats, right, kl, agree), logp_AV


class Bench:
    """One sample, read by the unpatched model; then under any setting."""

    def __init__(self, model: Any, sample: Sample, share: bool = True) -> None:
        self.model, self.sample, self.share = model, sample, share
        self.decoder = model.base_model
        with torch.no_grad(), Shared.record(self.decoder) as self.shared:
            _, cache = read_ids(model, sample.turns[0], None)
        with torch.no_grad():
            for turn in sample.turns[1:]:
                _, cache = read_ids(model, turn, cache)
            self.nbytes = count_bytes(cache)
            found = [judge(model, probe, copy.deepcopy(cache), None) for probe in sample.probes]
            self.judged, self.full = [judged for judged, _ in found], [logp_AV for _, logp_AV in found]
            _, cache = read_ids(model, sample.turns[0][:UNREAD], None)
            self.unread = self._judge_all(cache, copy.deepcopy)

    def measure(self, setting: Setting) -> tuple[list[Judged], float]:
        """Read the sample under a setting; return a judgement per probe, and the cache's bytes over the full cache's."""
        row = setting.row
        with torch.no_grad(), kvpatch.patched(self.model, row.policy, setting.k, seed=SEED, **row.options):
            replayed = self.share and "block" not in row.options
            with self.shared.replayed(self.decoder) if replayed else nullcontext():
                _, cache = read_ids(self.model, self.sample.turns[0], None)
            for turn in self.sample.turns[1:]:
                _, cache = read_ids(self.model, turn, cache)
            return self._judge_all(cache, type(cache).clone), count_bytes(cache) / self.nbytes

    def _judge_all(self, cache: Any, clone: Callable[[Any], Any]) -> list[Judged]:
        """Judge all probes, each on a cache of its own."""
        pairs = zip(self.sample.probes, self.full, strict=True)
        return [judge(self.model, probe, clone(cache), full)[0] for probe, full in pairs]


def count_bytes(cache: Any) -> int:
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
