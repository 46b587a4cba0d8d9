"""Budgets under which a head's number of tokens follows the text: by its length (Share), or by the scores (Mass, Threshold).

Between decode steps a head holds what its budget says of the tokens seen so far; so heads of one layer, and rows of a batch,
evict at different steps and any number of tokens at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .budgets import MAX_POSITION, Rule, check_k, is_number, share
from .context import EvictionContext
from .needs.sums import has_sums
from .numbers import running_sum
from .selection import FIRST, LAST
from .served import FeatureSet, refuse


@dataclass(frozen=True)
class Share(Rule):
    """A share of all tokens seen, generated ones included: the budget grows with the text.

    After a prompt of n tokens and t generated ones a head may hold floor(part * (n + t)) tokens, at least 1. At a decode step a
    head whose budget has not grown evicts one token. Protected sizes, and shares of the budget such as recent=0.5, are of the
    budget where the prompt ends. Where decode steps evict nothing (schedule "prompt"), it is the share k=part.

    Attributes:
        part: share in (0, 1]; 1.0 never evicts.
        of: "seen", all tokens seen; a share of the prompt is k=part.

    Example:
        with kvpatch.patched(model, "h2o", k=kvpatch.Share(0.5, of="seen")):
            model.generate(**inputs, max_new_tokens=2000)
    """

    part: float
    of: str = "seen"
    moves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise KVPatchError for a share or an origin (`of`) out of range, as soon as the user makes the budget."""
        if not is_number(self.part) or not 0.0 < self.part <= 1.0:
            raise KVPatchError(f"Share({self.part!r}): give a share in (0, 1], such as Share(0.5).")
        if self.of != "seen":
            raise KVPatchError(
                f"Share({self.part}, of={self.of!r}): give of='seen', all tokens so far; k={self.part} is of the prompt."
            )

    def __str__(self) -> str:
        return f"Share({self.part!r}, of={self.of!r})"

    @property
    def evicts(self) -> bool:
        return self.part < 1.0

    def tokens(self, n: int) -> int:
        return max(1, share(float(self.part), n))

    def most(self, n: int, new: int | None = 0) -> int:
        return MAX_POSITION if new is None else self.tokens(n + new)

    def bound(self, most: int) -> int:
        return MAX_POSITION

    def check(self, policy: Any, heads: int) -> None:
        if policy.schedule != "prompt":  # if no step evicts, it does not move: it is a plain share of the prompt
            refuse("moving budget", FeatureSet(policy, k=self))
        refuse("Share", FeatureSet(policy, k=self))

    def kept(self, score: Any, context: EvictionContext, keys_BHT: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return each head's budget, a share of the tokens that its row has seen, but no more than it holds; and None.

        `PromptEnd.count_by_scores` and `_evict_over_budget` call it. No sum of evicted scores is needed.
        """
        seen = (context.newest_B11 + 1).to(torch.float64)  # float64: rounded as `tokens` rounds Python's floats
        count = (seen * self.part + 1e-6).floor().long().clamp(min=1)
        return torch.minimum(count, (keys_BHT > FIRST).sum(-1, keepdim=True)), None


@dataclass(frozen=True)
class Mass(Rule):
    """The fewest tokens of each head whose scores sum to at least a share of all scores' sum, protected tokens included.

    Where a prompt (or block) ends, let S be the sum of s[i] over the tokens that a head holds and over those it has evicted,
    each with the score that it had when it went. The head keeps its protected tokens and then the highest scores, until those
    kept sum to at least share * S. While decoding the same is done after each new token has entered and its row was added to
    the scores: a head that can spare none grows, and one that can spare several evicts them at once. So a head has never lost
    more than 1 - share of what there was.

    Scores that are no sums over the text, such as those of an observation window, are measured anew by each prompt or block:
    S is then of the held tokens alone, and tokens of the window, which have no such score, count as 0. Where the policy keeps
    tokens outside the budget (a prompt under schedule "decode", earlier turns) the sums are over the others. Tokens that have
    left a sliding window count as 0, and go first unless they are protected.

    Attributes:
        share: share of the sum, in (0, 1]; 1.0 evicts what is over the ceiling alone, and without one never.
        floor: fewest tokens that a head keeps: tokens (int) or a share of the prompt (float).
        ceiling: most tokens that a head keeps, in the same units, or None. Shares of the budget, such as recent=0.5, are of it.

    Example:
        with kvpatch.patched(model, "snapkv", k=kvpatch.Mass(0.95, ceiling=0.5)) as patch:
            model.generate(**inputs, max_new_tokens=256)
        print(patch.report().held())
    """

    share: float
    floor: int | float = 1
    ceiling: int | float | None = None
    aligned: ClassVar[bool] = False
    moves: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise KVPatchError for a share or bounds out of range, as soon as the user makes the budget."""
        if not is_number(self.share) or not 0.0 < self.share <= 1.0:
            raise KVPatchError(f"Mass({self.share!r}): give a share of the scores' sum in (0, 1], such as Mass(0.95).")
        for name in ("floor", "ceiling"):
            value = getattr(self, name)
            if value is None and name == "ceiling":
                continue
            if not isinstance(value, int | float):
                raise KVPatchError(f"Mass({name}={value!r}): give tokens such as 64 or a share of the prompt such as 0.1.")
            check_k(value, f"Mass({name}={value!r})")
        if self.ceiling is not None and type(self.floor) is type(self.ceiling) and self.floor > self.ceiling:
            raise KVPatchError(f"Mass(floor={self.floor}, ceiling={self.ceiling}): exchange floor and ceiling.")

    def __str__(self) -> str:
        bounds = "" if self.floor == 1 and isinstance(self.floor, int) else f", floor={self.floor}"
        return f"Mass({self.share!r}{bounds}{'' if self.ceiling is None else f', ceiling={self.ceiling}'})"

    @property
    def evicts(self) -> bool:
        return self.share < 1.0 or self.ceiling is not None

    def tokens(self, n: int) -> int:
        return MAX_POSITION if self.ceiling is None else max(1, share(self.ceiling, n))

    def least(self, n: int) -> int:
        return min(max(1, share(self.floor, n)), self.tokens(n))

    def check(self, policy: Any, heads: int) -> None:
        """Raise KVPatchError for policies that do not go with this budget (by the table REFUSED), before `patched` acts.

        Without a ceiling, refuse a protected size that is a share of the budget, too.
        """
        refuse("moving budget", FeatureSet(policy, k=self))
        refuse("weighed budget", FeatureSet(policy, k=self))
        if self.ceiling is None:
            _check_sizes(self, policy, "add a ceiling, which it is then a share of: k=Mass(0.95, ceiling=0.5)")
        refuse("Mass", FeatureSet(policy, k=self))  # raises by the table REFUSED

    def kept(self, score: Any, context: EvictionContext, keys_BHT: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tokens [B,H,1] that each head keeps, and the sum of the scores that it has evicted so far, or None.

        `PromptEnd.count_by_scores` and `_evict_over_budget` call it: it counts the fewest best tokens that have `share` of all
        scores, evicted ones included, as they were. has_sums: scores are sums over the text, to which steps add. keys_BHT:
        eviction keys, which sort tokens by score, protected ones first (selection.py).
        """
        # reached: sum of the best scores up to each token; held: of all tokens; lost: of evicted ones, if scores are sums
        weight = _weigh_tokens(score, context, keys_BHT)
        order = keys_BHT.argsort(dim=-1, descending=True)  # protected tokens first, dead ones and empty slots last
        reached = running_sum(weight.gather(-1, order))
        held, are_sums = reached[..., -1:], has_sums(score.needs)
        lost = context.lost_BH1 if are_sums and context.lost_BH1 is not None else torch.zeros_like(held)
        n_enough = (reached < (held + lost) * self.share).sum(-1, keepdim=True) + 1
        in_kept_prompt = (context.positions_BHT >= 0) & (context.positions_BHT < context.limits.prompt)
        least = context.limits.nominal + in_kept_prompt.sum(-1, keepdim=True)  # protected tokens, and a kept prompt
        count = torch.maximum(n_enough, least)
        count = count if context.keep_BH1 is None else torch.minimum(count, context.keep_BH1)
        count = _clamp_counts(count, keys_BHT)
        return count, lost + (held - reached.gather(-1, count - 1)) if are_sums else None


@dataclass(frozen=True)
class Threshold(Rule):
    """The tokens of each head whose score is at least x; a lower one goes once it is older than the protected tokens.

    Decided where a prompt (or block) ends, and while decoding after each new token has entered and its row was added to the
    scores. A head keeps its protected tokens (`sinks=`, `recent=`, an observation window) in any case, and never less than one
    token: the highest score.

    Attributes:
        x: in the units of the policy's score, at least 0: a sum of probabilities for h2o, a mean of them for roco.

    Example:
        with kvpatch.patched(model, "roco", k=kvpatch.Threshold(0.001), recent=64, protected=0):
            model.generate(**inputs, max_new_tokens=256)
    """

    x: float
    aligned: ClassVar[bool] = False
    moves: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not is_number(self.x) or not 0.0 <= self.x < math.inf:
            raise KVPatchError(f"Threshold({self.x!r}): give a score of at least 0, such as Threshold(0.01).")

    def __str__(self) -> str:
        return f"Threshold({self.x!r})"

    def tokens(self, n: int) -> int:
        return MAX_POSITION

    def least(self, n: int) -> int:
        return 1

    def check(self, policy: Any, heads: int) -> None:
        refuse("moving budget", FeatureSet(policy, k=self))
        refuse("weighed budget", FeatureSet(policy, k=self))
        _check_sizes(self, policy)

    def kept(self, score: Any, context: EvictionContext, keys_BHT: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return how many tokens of each head are protected or have a score of at least x, one at least; and None.

        `PromptEnd.count_by_scores` and `_evict_over_budget` call it. No sum of evicted scores is needed. score.unit: G if the
        score is summed over the G query heads of a group, so that x is of their mean.
        """
        above = (keys_BHT == LAST) | ((context.value >= self.x * score.unit(context.group)) & (keys_BHT >= 0))
        return _clamp_counts(above.sum(-1, keepdim=True), keys_BHT), None


def _clamp_counts(count_BH1: Tensor, keys_BHT: Tensor) -> Tensor:
    """Clamp counts of tokens to keep, for `kept` of Mass and Threshold: at least the protected, at most what can be seen.

    keys_BHT: eviction keys: LAST for protected tokens, below 0 for empty slots and tokens that left a sliding window.
    """
    protected, live = (keys_BHT == LAST).sum(-1, keepdim=True), (keys_BHT >= 0).sum(-1, keepdim=True)
    return torch.minimum(torch.maximum(count_BH1, protected), live).clamp(min=1)


def _weigh_tokens(score: Any, context: EvictionContext, keys_BHT: Tensor) -> Tensor:
    """Return the scores [B,H,T] that `Mass.kept` adds up; 0 for tokens that a budget by scores leaves out.

    keys_BHT: below 0 for empty slots and tokens that left a sliding window. limits.prompt: end of a prompt that is kept whole.
    """
    counted = keys_BHT >= 0
    if (dead := context.dead_BHT) is not None:  # out of a sliding window; protected ones too
        counted = counted & ~dead
    if context.limits.any_prompt:
        counted = counted & (context.positions_BHT >= context.limits.prompt)
    if any(need.protects for need in score.needs):  # the tokens of an observation window have no score
        counted = counted & (context.positions_BHT <= context.newest_B11 - context.limits.observed)
    return context.value.nan_to_num(0.0, posinf=torch.finfo(context.value.dtype).max).masked_fill(~counted, 0.0)


# ---- policies that go with these budgets ----


def _check_sizes(rule: Rule, policy: Any, also: str = "") -> None:
    """Raise KVPatchError, for `check`, if `recent=` or the like is a share of this budget, which has no fixed number of tokens.

    also: another remedy, for the message. scope.ranked: name of the option for tokens that are protected by rank.
    """
    for name in ("recent", policy.scope.ranked):
        value = policy.options().get(name)
        if isinstance(value, float) and value > 0.0:
            raise KVPatchError(
                f"{name}={value} is a share of the budget, which k={rule} does not give as a number of tokens: give "
                f"tokens, such as {name}=32{f', or {also}' if also else ''}."
            )
