"""How far a policy and a budget move a model's next-token distributions on one text: the figures of `kvpatch compare`.

The same known tokens are fed to the unpatched and to the patched model (teacher forcing), so that a difference between two
predictions is the cache's doing and not that of a text which has gone another way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..cache.cache import EvictingCache
from ..errors import KVPatchError
from ..patching import patched
from ..policies import Policy
from ..policies.budgets import share
from ..report import Report
from .teacher_forcing import Fed, feed


@dataclass(frozen=True)
class Figures:
    """What one policy did under one budget, against the unpatched model, over the fed tokens.

    budget: tokens that `k` comes to. kl, worst: mean and largest KL(full || evicted) of a next token, nats. agreement: share
    of predictions whose likeliest token is the full cache's. loss: by how much the fed text's own loss rises, nats per
    token; None where a single token was fed. nbytes: keys and values really allocated at the end. held: tokens of the
    emptiest and the fullest head at the end. seconds: of all fed tokens. cut: protected sizes that did not fit into the
    budget, option -> (asked for, left).
    """

    budget: int
    kl: float
    worst: float
    agreement: float
    loss: float | None
    nbytes: int
    held: tuple[int, int]
    seconds: float
    cut: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A policy and a budget, both as they were typed; figures, or why there are none."""

    policy: str
    k: str
    figures: Figures | None
    error: str = ""


@dataclass(frozen=True)
class Result:
    """All rows; the unpatched model's bytes and its seconds for all fed tokens; tokens of the prompt and fed ones."""

    rows: list[Row]
    nbytes: int
    seconds: float
    n: int
    fed: int


class Comparison:
    """One text on one model. ids [1,n+m]: a prompt of n tokens, and m that are fed one by one."""

    def __init__(self, model: Any, ids_1T: Tensor, n: int, schedule: str | None = None, seed: int = 0) -> None:
        self.model, self.ids_1T, self.n, self.schedule, self.seed = model, ids_1T, n, schedule, seed
        with patched(model, "random", 0.5):  # a model without an adapter ends here; what is slow once should not count
            feed(model, ids_1T[:, : n + 1], n)
        feed(model, ids_1T[:, : n + 1], n)
        full = feed(model, ids_1T, n)
        self.nbytes, self.seconds = full.nbytes, [full.seconds]
        self.log_p_SV = _log_probabilities(full)

    def run(
        self, policies: dict[str, Policy], ks: dict[str, Any], on_row: Callable[[Row], None] = lambda row: None
    ) -> Result:
        """Every policy under every budget; the unpatched model takes its turn once per budget."""
        rows = []
        for text, k in ks.items():
            self.seconds.append(feed(self.model, self.ids_1T, self.n).seconds)
            for name, policy in policies.items():
                rows.append(self._row(name, policy, text, k))
                on_row(rows[-1])
        return Result(rows, self.nbytes, median(self.seconds), self.n, self.ids_1T.shape[1] - self.n)

    def _row(self, name: str, policy: Policy, text: str, k: Any) -> Row:
        try:
            return Row(name, text, self.figures(policy, k))
        except KVPatchError as error:
            return Row(name, text, None, str(error))

    def figures(self, policy: Policy, k: Any) -> Figures:
        """Raises KVPatchError for what the policy refuses, and where its predictions are no numbers."""
        with patched(self.model, policy, k, schedule=self.schedule, seed=self.seed) as patch:
            fed = feed(self.model, self.ids_1T, self.n)
        log_q_SV, held = _log_probabilities(fed), Report.of(fed.cache).held()
        kl_S, same_S = divergence(self.log_p_SV, log_q_SV)
        own_S1 = self.ids_1T[0, self.n + 1 :, None].cpu()  # the last fed token's successor is not known
        rise_S1 = (self.log_p_SV - log_q_SV)[:-1].gather(1, own_S1)
        return Figures(
            budget=min(patch.settings.budget.tokens(0, self.n), self.n),
            kl=float(kl_S.mean()),
            worst=float(kl_S.max()),
            agreement=float(same_S.double().mean()),
            loss=float(rise_S1.mean()) if rise_S1.numel() else None,
            nbytes=fed.nbytes,
            held=(int(held.min()), int(held.max())),
            seconds=fed.seconds,
            cut=cut_sizes(fed.cache, self.n),
        )


def divergence(log_p_SV: Tensor, log_q_SV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) in nats, and whether the likeliest tokens are the same, both [S]; a token that p excludes counts 0."""
    p_SV = log_p_SV.exp()
    kl_S = torch.where(p_SV > 0, p_SV * (log_p_SV - log_q_SV), 0.0).sum(-1).clamp_min(0.0)
    return kl_S, log_p_SV.argmax(-1) == log_q_SV.argmax(-1)


def _log_probabilities(fed: Fed) -> Tensor:
    """float64 [S,V], after each fed token; the prediction after the prompt is left out, for no eviction came before it."""
    logits_SV = fed.logits_BSV[0, 1:].cpu().double()
    if logits_SV.isnan().any():
        raise KVPatchError("The model's predictions are no numbers (NaN); another --dtype, such as float32, may help.")
    return logits_SV.log_softmax(-1)


def cut_sizes(cache: EvictingCache, n: int) -> dict[str, tuple[int, int]]:
    """Protected sizes that the budget had no room for: option -> (asked for, left), of the layer that has least room."""
    scope, score = cache.settings.policy.scope, cache.settings.policy.score
    cut: dict[str, tuple[int, int]] = {}
    for index, layer in enumerate(cache.layers):
        budget = cache.settings.tokens(index, n)
        if score is None or layer.limits is None or budget >= n or not cache.settings.budget.evicts(index):
            continue
        tail, recent = score.observed_rows if score.protects_window else 0, share(scope.recent, budget)
        newest, limits = "window" if tail > recent else "recent", layer.limits
        asked = {"sinks": scope.sinks, newest: max(tail, recent), "protected": share(scope.deviation, budget)}
        left = {"sinks": limits.first, newest: limits.newest, "protected": limits.deviation}
        for name, size in asked.items():
            if int(left[name]) < min(size, cut.get(name, (0, size))[1]):
                cut[name] = size, int(left[name])
    return cut
