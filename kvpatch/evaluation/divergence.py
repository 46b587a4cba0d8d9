"""Divergence of next-token distributions between the patched and the unpatched model: the figures of `kvpatch compare`.

Both models are fed the same known tokens (teacher forcing), so that predictions differ because of the cache and not because
of different generated text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..backends.entries import FULL
from ..cache.cache import EvictingCache
from ..errors import KVPatchError
from ..hooks.target import Target
from ..patching import patched
from ..policies import Policy
from ..policies.budgets import share
from ..report import Report
from .teacher_forcing import Fed, feed


@dataclass(frozen=True)
class DivergenceFigures:
    """Figures of one policy under one budget, over the fed tokens, relative to the unpatched model.

    Attributes:
        budget: tokens that `k` amounts to.
        kl: mean KL(full || evicted) of the next token, nats.
        worst: largest KL(full || evicted) of a next token, nats.
        agreement: share of predictions with the same likeliest token.
        loss: increase of the fed text's loss, nats per token; None if a single token was fed.
        nbytes: bytes allocated for keys and values at the end.
        held: fewest and most tokens that a head holds at the end.
        mean_held: tokens that a head holds at the end, on average.
        cut: protected sizes that exceeded the budget, option -> (requested, remaining).
    """

    budget: int
    kl: float
    worst: float
    agreement: float
    loss: float | None
    nbytes: int
    held: tuple[int, int]
    mean_held: float
    cut: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Row of the comparison: policy and budget as typed, bits, and the figures or the error message."""

    policy: str
    k: str
    figures: DivergenceFigures | None
    error: str = ""
    bits: int = FULL

    @property
    def size(self) -> str:
        """The budget, and the bits where they are fewer."""
        return self.k if self.bits == FULL else f"{self.k}, {self.bits} bits"


@dataclass(frozen=True)
class DivergenceTable:
    """Result of a comparison.

    Attributes:
        rows: one per policy and budget.
        nbytes: cache bytes of the unpatched model.
        n: tokens of the prompt.
        fed: tokens fed after it.
        counted: predictions that the figures are of.
    """

    rows: list[Row]
    nbytes: int
    n: int
    fed: int
    counted: int


class Comparison:
    """Comparison of policies and budgets on one text.

    Args:
        model: a causal language model.
        ids_1T: token ids of the text.
        n: tokens of the prompt, read in one pass; the rest is fed one by one.
        schedule: of the policies; None for each policy's own.
        seed: of the policies' random numbers.
        asked: tokens of a question at the beginning of what is fed after the prompt; predictions within it do not count.
    """

    def __init__(self, model: Any, ids_1T: Tensor, n: int, schedule: str | None = None, seed: int = 0, asked: int = 0) -> None:
        """Feed the text to the unpatched model, and keep its predictions and bytes, with which settings are compared."""
        self.model, self.ids_1T, self.n, self.schedule, self.seed = model, ids_1T, n, schedule, seed
        # index of the first prediction that counts: not the prompt's own, which precedes any eviction, nor a question's
        self.first = max(1, asked)
        Target.find(model)  # raises for a model without an adapter, before anything is measured
        full = feed(model, ids_1T, n)  # logits of the prompt's last token and of each fed one, and the cache's bytes
        self.nbytes = full.nbytes
        self.log_p_SV = self._log_probabilities(full)  # of the S predictions that count

    def run(
        self,
        policies: dict[str, Policy],
        ks: dict[str, Any],
        on_row: Callable[[Row], None] = lambda row: None,
        on_start: Callable[[str, str], None] = lambda policy, size: None,
        bits: Sequence[int] = (FULL,),
    ) -> DivergenceTable:
        """Measure every policy under every budget, with each of these numbers of bits, for `kvpatch compare`.

        Args:
            policies: by the names that rows show.
            ks: budgets, by the texts that rows show.
            on_row: called with each row when it is measured.
            on_start: called with a policy's name and the text of a size before they are measured.
            bits: of each key and value held.
        """
        rows = []
        for (text, k), b, (name, policy) in product(ks.items(), bits, policies.items()):
            on_start(name, Row(name, text, None, bits=b).size)
            rows.append(self._make_row(name, policy, text, k, b))
            on_row(rows[-1])
        return self.result(rows)

    def result(self, rows: list[Row]) -> DivergenceTable:
        """Return a table of rows, with the sizes of the text and the bytes that the unpatched model held."""
        return DivergenceTable(rows, self.nbytes, self.n, self.ids_1T.shape[1] - self.n, len(self.log_p_SV))

    def _make_row(self, name: str, policy: Policy, text: str, k: Any, bits: int = FULL) -> Row:
        """Measure a policy under the budget `k`, typed as `text`, for `run`. A KVPatchError becomes the row's error."""
        try:
            return Row(name, text, self.measure_policy(policy, k, bits), bits=bits)
        except KVPatchError as error:
            return Row(name, text, None, str(error), bits)

    def measure_policy(self, policy: Policy, k: Any, bits: int = FULL) -> DivergenceFigures:
        """Measure one policy under one budget: feed the text under it, and compare its predictions with the unpatched model's.

        `_make_row` calls it.

        Raises:
            KVPatchError: the policy refuses the budget or schedule, or predictions are NaN.
        """
        with patched(self.model, policy, k, bits=bits, schedule=self.schedule, seed=self.seed) as patch:
            fed = feed(self.model, self.ids_1T, self.n)
        held = Report.of(fed.cache).held()  # tokens of each head [L,B,H]; -1 where a layer has fewer heads
        log_q_SV, held = self._log_probabilities(fed), held[held >= 0]
        # p: probabilities by the full cache, q: under the policy
        kl_S, same_S = divergence(self.log_p_SV, log_q_SV)
        next_S1 = self.ids_1T[0, self.n + self.first :, None].cpu()  # the token after the last fed one is not known
        rise_S1 = (self.log_p_SV - log_q_SV)[:-1].gather(1, next_S1)  # how far the loss of the true token rises, in nats
        return DivergenceFigures(
            budget=min(patch.settings.budget.rules[0].tokens(self.n), self.n),
            kl=float(kl_S.mean()),
            worst=float(kl_S.max()),
            agreement=float(same_S.double().mean()),
            loss=float(rise_S1.mean()) if rise_S1.numel() else None,
            nbytes=fed.nbytes,
            held=(int(held.min()), int(held.max())),
            mean_held=float(held.double().mean()),
            cut=list_cut_sizes(fed.cache, self.n),
        )

    def _log_probabilities(self, fed: Fed) -> Tensor:
        """Return log-probabilities [S,V] of the S predictions from `first` on, in float64, for `measure_policy` to compare."""
        logits_SV = fed.logits_BSV[0, self.first :].cpu().double()
        if logits_SV.isnan().any():
            raise KVPatchError("The model's predictions are no numbers (NaN); another --dtype, such as float32, may help.")
        return logits_SV.log_softmax(-1)


def divergence(log_p_SV: Tensor, log_q_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(p || q) [S] in nats, and bool [S], whether p and q have the same likeliest token; for `measure_policy`.

    log_p_SV, log_q_SV: log-probabilities of S predictions, p by the full cache, q by another.
    """
    p_SV = log_p_SV.exp()
    kl_S = torch.where(p_SV > 0, p_SV * (log_p_SV - log_q_SV), 0.0).sum(-1).clamp_min(0.0)
    return kl_S, log_p_SV.argmax(-1) == log_q_SV.argmax(-1)


def list_cut_sizes(cache: EvictingCache, n: int) -> dict[str, tuple[int, int]]:
    """Return protected sizes that did not fit the budget of an n-token prompt: option -> (requested, the least that was left).

    `measure_policy` and `_warn_of_cut_sizes` report them; the least is over all layers that evict.
    """
    policy = cache.settings.policy
    scope = policy.scope
    cut: dict[str, tuple[int, int]] = {}
    for index, layer in enumerate(cache.layers):
        budget = cache.settings.tokens(index, n)
        if layer.limits is None or budget >= n or not cache.settings.budget.rules[index].evicts:
            continue
        # the newest tokens are protected by an observation window or by recent=, whichever is larger
        observed, recent = policy.needs.protects, share(scope.recent, budget)
        newest, limits = "window" if observed > recent else "recent", layer.limits
        requested = {"sinks": scope.sinks, newest: max(observed, recent), scope.ranked: share(scope.deviation, budget)}
        granted = {"sinks": limits.first, newest: limits.newest, scope.ranked: limits.deviation}
        for name, size in requested.items():
            if int(granted[name]) < min(size, cut.get(name, (0, size))[1]):
                cut[name] = size, int(granted[name])
    return cut
