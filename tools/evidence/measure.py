"""Measure one sample under all settings.

A prompt is read with full attention whatever the policy, and evicted at its end. So nearly all that a pass over it costs is the
same under all policies. What its tokens pass outside attention is computed once, by the unpatched model, and handed to the
passes of the others. Full attention, and a second reading by policies that do one, are computed by the first policy that asks,
and looked up by their inputs afterwards. Passes over later turns and probes compute everything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvpatch
from kvpatch.arch.upstream import cache_argument, cache_of
from kvpatch.cache.cache import EvictingCache

from .samples import Probe, Sample
from .settings import Setting

SEED = 0
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
UNREAD = 4  # tokens of a prompt that say nothing of it: what a model knows without the text


@contextmanager
def reuse(known: dict[Hashable, Any], decoder: nn.Module) -> Iterator[None]:
    """Compute at most once what passes over one prompt have in common: outputs, put into `known` by what they are made from."""
    called: set[str] = set()

    def remember(key: Hashable, compute: Callable[[], Any]) -> Any:
        if key not in known:
            known[key] = compute()
        return known[key]

    with ExitStack() as stack:
        for name, module in _modules_around_attention(decoder):

            def forward(x: Tensor, name: str = name, module: nn.Module = module) -> Any:
                read = _identify(x) if name in called else x.shape  # first calls differ in rounding alone
                called.add(name)
                return remember((name, read), partial(type(module).forward, module, x))

            stack.enter_context(mock.patch.object(module, "forward", forward))
        kernel = getattr(torch.ops.aten, FLASH)

        def attend(*inputs: Any, **named: Any) -> Any:
            return remember(tuple(map(_identify, (*inputs, *named.values()))), partial(kernel, *inputs, **named))

        stack.enter_context(mock.patch.object(torch.ops.aten, FLASH, attend))
        yield


def _identify(value: Any) -> Hashable:
    """Return what tells a tensor from others, to the last bit; any other value as it is."""
    return (value.shape, hash(value.numpy().tobytes())) if isinstance(value, Tensor) else value


def _modules_around_attention(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules of a decoder in which no attention is computed, with their paths: norms, projections, MLPs."""
    for name, child in module.named_children():
        if any("Attention" in type(part).__name__ for part in child.modules()):
            yield from _modules_around_attention(child, f"{path}{name}.")
        elif "Rotary" not in type(child).__name__ and not isinstance(child, nn.Embedding):
            yield path + name, child


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


def judge(model: Any, probes: Sequence[Probe], cache: Any, full: Sequence[Tensor | None]) -> list[tuple[Judged, Tensor]]:
    """Read probes of one length, a row each, on top of a cache of one row; return judgements and log probabilities [A,V].

    full: log probabilities of the full cache, or None. The cache is changed, but an EvictingCache evicts nothing.
    """
    cache.batch_repeat_interleave(len(probes))
    ids_BN = torch.tensor([probe.lead + probe.answer for probe in probes])[:, :-1]
    if isinstance(cache, EvictingCache):
        cache.plans.prompt_len = cache.columns_read + ids_BN.shape[1] + 1  # a piece of a prompt that goes on
    logits_BLV, _ = read_rows(model, ids_BN, cache, max(len(probe.answer) for probe in probes))
    found = []
    for probe, logits_LV, full_AV in zip(probes, logits_BLV, full, strict=True):
        logp_AV = logits_LV[-len(probe.answer) :].float().log_softmax(-1)
        answer_A = torch.tensor(probe.answer)
        nats = F.nll_loss(logp_AV, answer_A).item()
        right = float((logp_AV.argmax(-1) == answer_A).all())
        kl = agree = 0.0
        if full_AV is not None:
            kl = F.kl_div(logp_AV, full_AV, log_target=True, reduction="batchmean").item()
            agree = (logp_AV.argmax(-1) == full_AV.argmax(-1)).float().mean().item()
        found.append((Judged(probe.kind, nats, right, kl, agree), logp_AV))
    return found


class Bench:
    """One sample, read by the unpatched model; then under any setting."""

    def __init__(self, model: Any, sample: Sample, share: bool = True) -> None:
        self.model, self.sample, self.share = model, sample, share
        self.decoder = model.base_model
        self.known: dict[Hashable, Any] = {}
        with torch.no_grad(), reuse(self.known, self.decoder):
            _, cache = read_ids(model, sample.turns[0], None)
        with torch.no_grad():
            for turn in sample.turns[1:]:
                _, cache = read_ids(model, turn, cache)
            self.nbytes = count_bytes(cache)
            self.full: tuple[Tensor | None, ...] = (None,) * len(sample.probes)
            self.judged, self.full = self._judge_all(cache, copy.deepcopy)
            _, cache = read_ids(model, sample.turns[0][:UNREAD], None)
            self.unread, _ = self._judge_all(cache, copy.deepcopy)

    def measure(self, setting: Setting) -> tuple[tuple[Judged, ...], float]:
        """Read the sample under a setting; return a judgement per probe, and the cache's bytes over the full cache's."""
        row = setting.row
        with torch.no_grad(), kvpatch.patched(self.model, row.policy, setting.k, seed=SEED, **row.options):
            with reuse(self.known, self.decoder) if self.share and "block" not in row.options else nullcontext():
                _, cache = read_ids(self.model, self.sample.turns[0], None)
            for turn in self.sample.turns[1:]:
                _, cache = read_ids(self.model, turn, cache)
            return self._judge_all(cache, type(cache).clone)[0], count_bytes(cache) / self.nbytes

    def _judge_all(self, cache: Any, clone: Callable[[Any], Any]) -> tuple[tuple[Judged, ...], tuple[Tensor, ...]]:
        """Judge all probes on copies of a cache, those of one length together; return judgements and log probabilities."""
        probes, found = self.sample.probes, dict[int, tuple[Judged, Tensor]]()
        lengths = [len(probe.lead + probe.answer) for probe in probes]
        for length in dict.fromkeys(lengths):
            rows = [i for i, n in enumerate(lengths) if n == length]
            judged = judge(self.model, [probes[i] for i in rows], clone(cache), [self.full[i] for i in rows])
            found |= zip(rows, judged, strict=True)
        return tuple(zip(*(found[i] for i in range(len(probes))), strict=True))  # type: ignore[return-value]


def count_bytes(cache: Any) -> int:
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
