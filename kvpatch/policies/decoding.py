"""Scores for long generations: what decode steps have used, or what the last queries look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KVPatchError
from . import noise
from .budgets import check_count, is_number
from .content import sort_by_position
from .context import EvictionContext, accumulator
from .needs import AnyNeed, Held, LastQueries, LastUses
from .scores import Score, check_pooling, draw_anew

# ---- the last use of a token ----


@dataclass(frozen=True)
class LastUse(Score):
    """The last decode step that used a token [RaaS].

    s[i] = the last generated token t with a[t,i] > alpha, or i if there is none.

    Differs from the paper: tokens rather than pages of 16 of them.

    Attributes:
        alpha: attention above which a decode step uses a token.
    """

    alpha: float = 1e-4
    schedules: ClassVar[tuple[str, ...]] = ("decode",)
    signed: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (LastUses(alpha=self.alpha),)

    def value(self, context: EvictionContext) -> Tensor:
        return context.state["last_use"].float()


@dataclass(frozen=True)
class Recurrence(LastUse):
    """The time since the last use of a token, in the longest time that it went unused before [LazyEviction].

    A decode step t with a[t,i] > alpha uses token i, and i's own step is its first use. Let u be the last use, and m the most
    steps between two uses in a row, at least 1. s[i] = -(now - u) / m: above -1, the token may still be used again as it was
    before.

    Differs from the paper: written from its description, without its code.

    Attributes:
        alpha: attention above which a decode step uses a token.
    """

    signed: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (LastUses(alpha=self.alpha, intervals=True),)

    def value(self, context: EvictionContext) -> Tensor:
        """Return minus the steps since each token's last use, over the most steps between two uses [B,H,T]."""
        return (context.state["last_use"] - context.newest_B11).float() / context.state["interval"]


# ---- what the last queries look at ----


@dataclass(frozen=True)
class RecentScore(Score):
    """Base class of scores of what the last queries look at. The tokens of these queries are kept.

    Attributes:
        window: last queries, and newest tokens that stay.
        kernel: odd number of neighbouring tokens whose attention is pooled.
        pooling: "max", "avg", or None for no pooling.
    """

    window: int = 8
    kernel: int = 7
    pooling: str | None = "max"
    schedules: ClassVar[tuple[str, ...]] = ("decode", "both")

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return LastQueries(self.window), Held()

    def check(self) -> None:
        check_count("window", self.window, "queries")
        check_pooling(self.kernel, self.pooling)

    def _pool_scores(self, score_BHT: Tensor, candidate_BHT: Tensor, context: EvictionContext) -> Tensor:
        """Pool scores [B,H,T] over neighbouring candidates (tokens before the last queries), for `value` at an eviction."""
        if self.pooling is None:
            return score_BHT
        order, _ = sort_by_position(context.positions_BHT)  # candidates first
        pool, least = (F.avg_pool1d, 0.0) if self.pooling == "avg" else (F.max_pool1d, -torch.inf)
        ordered = score_BHT.masked_fill(~candidate_BHT, least).gather(-1, order)
        pooled = torch.empty_like(score_BHT)
        pooled.scatter_(-1, order, pool(ordered, self.kernel, stride=1, padding=self.kernel // 2))
        return pooled.masked_fill(~candidate_BHT, 0.0)


@dataclass(frozen=True)
class Redundancy(RecentScore):
    """Attention of the last queries against likeness to other keys [R-KV].

    The last `window` queries look at the tokens before them: their logits are the greatest of the group's, their attention is
    the softmax over these tokens. A_i is the mean of that, pooled. Let c_ji be the cosine of the keys of two held tokens, and
    R_i the softmax over the held tokens of the mean of c_ji over all j. s[i] = weight * A_i - (1 - weight) * R_i.

    Of the tokens i whose c_ji is above `alike`, the newest counts as 0 for j: of what is said again, the last time stays.

    Differs from the paper: nothing; if no key is like that of j, the authors' code leaves out the first token's instead.

    Attributes:
        window: last queries, and newest tokens that stay.
        kernel: odd number of neighbouring tokens whose attention is pooled.
        pooling: "max", "avg", or None for no pooling.
        weight: share of the attention in the score, lambda in R-KV.
        alike: cosine above which a key repeats another; None counts all.
    """

    weight: float = 0.1
    alike: float | None = 0.5

    def check(self) -> None:
        """Raise KVPatchError for an option out of range. `Policy.__post_init__` calls it."""
        super().check()
        if not is_number(self.weight) or not 0 <= self.weight <= 1:
            raise KVPatchError(f"weight={self.weight!r} must be in [0, 1]: the share of the attention in the score.")
        if self.alike is not None and not (is_number(self.alike) and 0 <= self.alike <= 1):
            raise KVPatchError(f"alike={self.alike!r} must be a cosine in [0, 1], or None to count all keys.")

    def value(self, context: EvictionContext) -> Tensor:
        """Return the last queries' attention, less each key's redundancy, weighed [B,H,T], for `Policy.eviction_keys`."""
        looks = context.view(LastQueries)  # logits of the last queries; the group's greatest counts
        attention = self._pool_scores(looks.mean(looks.x_BHGWT.amax(2).softmax(-1)), looks.candidate_BHT, context)
        return self.weight * attention - (1 - self.weight) * self._find_redundancy(context)

    def _find_redundancy(self, context: EvictionContext) -> Tensor:
        """Return, for `value` at an eviction, how much each key repeats others [B,H,T]: the softmax of its mean cosine."""
        keys, position = context.view(Held)[0], context.positions_BHT
        keys, real = keys.to(accumulator(keys.dtype)), position >= 0
        unit = (keys / (torch.linalg.vector_norm(keys, dim=-1, keepdim=True) + _TINY)).masked_fill(~real[..., None], 0.0)
        total = (unit @ unit.sum(2)[..., None]).squeeze(-1) - unit.square().sum(-1)  # of the cosines to all others
        if self.alike is not None:
            total = total - _sum_last_repeats(unit, position, self.alike)
        return (total / real.sum(-1, keepdim=True)).masked_fill(~real, -torch.inf).softmax(-1)


def _sum_last_repeats(unit_BHTD: Tensor, position_BHT: Tensor, alike: float) -> Tensor:
    """Sum, for each token [B,H,T], its cosines to those keys of which it is the newest repetition (cosine > alike).

    `_find_redundancy` subtracts these sums, so that the last repetition of a text does not count as redundant.
    """
    B, H, T, _ = unit_BHTD.shape
    sums_BHT, slots = torch.zeros_like(unit_BHTD[..., 0]), torch.arange(T, device=unit_BHTD.device)
    position_BH1T = position_BHT[:, :, None].int()  # half of the bytes of a block's largest tensor
    at_once = _ON_CPU if unit_BHTD.device.type == "cpu" else _ON_DEVICE
    for block in slots.split(max(1, at_once // (B * H * T))):
        cosine = unit_BHTD[:, :, block] @ unit_BHTD.transpose(-1, -2)
        repeats = (cosine > alike) & (slots != block[:, None])
        newest = position_BH1T.masked_fill(~repeats, -1).max(-1)  # of each key's repetitions; -1: it has none
        newest_cosine = cosine.gather(-1, newest.indices[..., None])[..., 0]
        sums_BHT.scatter_add_(-1, newest.indices, newest_cosine.masked_fill(newest.values < 0, 0.0))
    return sums_BHT


@dataclass(frozen=True)
class SampledAttention(RecentScore):
    """A sample of tokens by the attention of the last queries [VaSE].

    The last `window` queries look at the tokens before them: their attention is the softmax over these tokens, averaged over
    queries and group, and pooled. s[i] = log of that + a standard Gumbel number, new at every eviction: the tokens with the
    greatest scores are a sample without replacement, in which each draw is in proportion to the attention.

    Differs from the paper: nothing.

    Attributes:
        window: last queries, and newest tokens that stay.
        kernel: odd number of neighbouring tokens whose attention is pooled.
        pooling: "avg", "max", or None for no pooling.
    """

    window: int = 64
    kernel: int = 5
    pooling: str | None = "avg"

    def value(self, context: EvictionContext) -> Tensor:
        """Return the logarithm of the last queries' attention plus fresh Gumbel noise [B,H,T], for `Policy.eviction_keys`."""
        looks = context.view(LastQueries)
        attention = self._pool_scores(looks.mean(looks.x_BHGWT.softmax(-1).mean(2)), looks.candidate_BHT, context)
        return attention.clamp_min(torch.finfo(attention.dtype).tiny).log() + noise.gumbel(draw_anew(context))


_TINY = 1e-8  # added to norms
_ON_CPU, _ON_DEVICE = 1 << 24, 1 << 26  # cosines that are held at a time
