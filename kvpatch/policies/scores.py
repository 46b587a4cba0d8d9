"""Scores: the importance of cached tokens, one small frozen class per score.

A score declares what it reads besides positions (`needs`), the values to store when a token enters the cache (`entry`), and a
function from these to one number per token (`value`). Attention probabilities arrive one block of query rows at a time, so no
n x n matrix exists.

In the formulas a[t,i] is the attention probability that query row t gives to token i, averaged over the query heads of a
group, and c[i] is the number of query rows that could see token i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KVPatchError
from . import noise
from .budgets import MAX_POSITION, check_count
from .context import EvictionContext, NewTokens, Observed
from .needs import AnyNeed, NoisySums, Sums, WindowAttention

Form = str | None
Value = TypeVar("Value", bound=Callable[..., Tensor])


def kernel_value(form: Form | Callable[[Any], Form]) -> Callable[[Value], Value]:
    """Decorate a score's `value`, as its class is defined: say from which numbers a decode kernel computes the same scores.

    `kernel_source` reads the declaration, an attribute of the function. The declaration belongs to the decorated function: if a
    subclass overrides `value`, torch calls it instead.

    form: name of a tensor in context.state, "mean" (context.mean) or "recency" (the position); None: no kernel can, and torch
    calls `value`; or a function of the score that returns one of these.
    """

    def declare(value: Value) -> Value:
        vars(value)["kernel_value"] = (value, form)
        return value

    return declare


@dataclass(frozen=True)
class Score:
    """Base class of scores: needs no attention and stores nothing.

    Subclasses are frozen dataclasses whose fields are their options; they implement `value` and declare what it needs.

    Attributes:
        schedules: schedules under which the score is defined.
        signed: whether values may be negative; False saves an operation per step, of the library's own classes.
        is_weight: whether values are non-negative and proportional to importance, so that two-stage selection may multiply them
            and Mass add them up.
        evicts: whether tokens are evicted at all.

    Example:
        @dataclass(frozen=True)
        class EveryOther(Score):
            def value(self, context):
                return (context.positions_BHT % 2 == 0).float()
    """

    schedules: ClassVar[tuple[str, ...]] = ("prompt", "decode", "both")
    signed: ClassVar[bool] = True
    is_weight: ClassVar[bool] = False
    evicts: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        """Needs: all that the score reads besides positions and its own entries; a class attribute if no option counts."""
        return ()

    @property
    def kernel_source(self) -> str | None:
        """Name of the tensor in context.state that a decode kernel reads instead of `value` (see @kernel_value), or None."""
        value, form = getattr(type(self).value, "kernel_value", (None, None))
        if value is not type(self).value:  # a wrapper may copy the attributes of the function that it wraps
            return None
        return form(self) if callable(form) else form

    def budget(self, k: object, policy: Any, bounds: Sequence[int | None]) -> object:
        """Return the budget of a policy with this score where the user asks for `k`: here `k`; `settings_of` calls it.

        bounds: sliding windows of layers, as in `Budget.parse`.
        """
        return k

    def unit(self, group: int) -> int:
        """Return the divisor that makes `value` a mean over the group of query heads: G if it is a sum, else 1."""
        return 1

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        """Return the values to store with tokens that enter the cache, by name: [B,H,Q], or [B,H,Q,n] of n numbers."""
        return {}

    def check(self) -> None:
        """Raise KVPatchError for an option out of range."""

    def value(self, context: EvictionContext) -> Tensor:
        """Return the scores [B,H,T], higher for tokens to keep; values in empty slots are ignored."""
        raise NotImplementedError


@dataclass(frozen=True)
class Never(Score):
    """The score of a policy that evicts nothing, such as "full"."""

    evicts: ClassVar[bool] = False


@dataclass(frozen=True)
class Random(Score):
    """Random eviction [RoCo, baselines].

    s[i] = a fresh uniform number at every eviction.

    Differs from the paper: nothing.
    """

    signed: ClassVar[bool] = False

    def value(self, context: EvictionContext) -> Tensor:
        return draw_anew(context)


def draw_anew(context: EvictionContext) -> Tensor:
    """Draw a uniform number for each token [B,H,T], for `value` of random scores; other ones at every eviction. A pure hash."""
    H = context.positions_BHT.shape[1]
    head = context.parallel.first(H) + torch.arange(H, device=context.positions_BHT.device)
    return noise.uniform(context.seed, context.layer, head[None, :, None], context.newest_B11, context.positions_BHT)


@dataclass(frozen=True)
class Recency(Score):
    """Window attention [RoCo 4.1].

    s[i] = i, the token's position.

    Differs from the paper: nothing.
    """

    signed: ClassVar[bool] = False

    @kernel_value("recency")
    def value(self, context: EvictionContext) -> Tensor:
        return context.positions_BHT.float()


@dataclass(frozen=True)
class DilatedRecency(Score):
    """Dilated window [Keyformer Figure 2; Longformer].

    Tokens at positions divisible by dilation + 1 rank above all others; within both sets newer tokens rank higher.

    Differs from the paper: the pattern is fixed in the text instead of moving with the query, since a cache cannot restore
    evicted tokens.

    Attributes:
        dilation: tokens skipped between two tokens of the pattern, 0 or more.
    """

    dilation: int = 1

    def check(self) -> None:
        if isinstance(self.dilation, bool) or not isinstance(self.dilation, int) or not 0 <= self.dilation <= MAX_POSITION:
            raise KVPatchError(f"dilation={self.dilation!r} must be a whole number of tokens skipped, 0 to {MAX_POSITION}.")

    def value(self, context: EvictionContext) -> Tensor:
        """Return positions of tokens on the pattern; of others position - newest - 1, which is below 0: [B,H,T]."""
        position = context.positions_BHT
        on_lattice = position % (self.dilation + 1) == 0
        return torch.where(on_lattice, position, position - context.newest_B11 - 1).float()


@dataclass(frozen=True)
class Summed(Score):
    """Base class of scores that sum over the attention of all query rows.

    Attributes:
        statistic: the sum, a row of statistics.STATISTICS.
        scores: "all" reads every row of a prompt; "sampled" reads blocks of a long prompt's rows, chosen by the seed, and
            estimates the sums of all rows from them, unbiased (see sampling.py).
    """

    scores: str = "all"
    statistic: ClassVar[str] = "sum"
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (Sums(self.statistic, sampled=self.scores == "sampled"),)

    def check(self) -> None:
        if self.scores not in ("all", "sampled"):
            raise KVPatchError(f"scores={self.scores!r} must be 'all' (every row of a prompt) or 'sampled' (some of them).")


@dataclass(frozen=True)
class Accumulated(Summed):
    """Accumulated attention score, AAS [H2O; RoCo 4.1].

    s[i] = sum of a[t,i] over all query rows t, those of the prompt included.

    Differs from the paper: nothing.

    Attributes:
        scores: "all", or "sampled": sums from a sample of a long prompt's rows.
    """

    def unit(self, group: int) -> int:
        return group

    @kernel_value("sum")
    def value(self, context: EvictionContext) -> Tensor:
        return context.state["sum"]


@dataclass(frozen=True)
class AccumulatedQuantized(Summed):
    """Accumulated quantized attention score, AQAS [ScissorHands; RoCo 4.1].

    s[i] = number of query rows t with a[t,i] > 1 / (number of keys that t attends to).

    Differs from the paper: no history window; with grouped queries the rows are counted per query head, then averaged.

    Attributes:
        scores: "all", or "sampled": counts from a sample of a long prompt's rows.
    """

    statistic: ClassVar[str] = "count"

    @kernel_value("count")
    def value(self, context: EvictionContext) -> Tensor:
        return context.state["count"] / context.group


@dataclass(frozen=True)
class Mean(Summed):
    """Mean attention score, MAS [RoCo 4.3].

    s[i] = sum of a[t,i] over all query rows t, divided by c[i].

    Differs from the paper: nothing.

    Attributes:
        scores: "all", or "sampled": sums from a sample of a long prompt's rows.
    """

    @kernel_value("mean")
    def value(self, context: EvictionContext) -> Tensor:
        return context.mean


@dataclass(frozen=True)
class Last(Score):
    """Last token's attention score, LTAS [TOVA; RoCo 4.1].

    s[i] = a[t,i] of the newest query row t.

    Differs from the paper: nothing.

    Attributes:
        heads: "layer" averages over all heads of the layer, which then keep the same tokens, as in TOVA's paper and code;
            "each" scores per KV head, as in RoCo's baseline.
    """

    heads: str = "layer"
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (WindowAttention(1),)

    def check(self) -> None:
        if self.heads not in ("layer", "each"):
            raise KVPatchError(f"heads={self.heads!r} must be 'layer' (one kept set per layer) or 'each'.")

    @kernel_value(lambda score: "observed" if score.heads == "each" else None)
    def value(self, context: EvictionContext) -> Tensor:
        """Return the newest row's attention [B,H,T], per KV head or averaged over the layer's.

        `Policy.eviction_keys` calls it at each eviction. "observed": what WindowAttention has written. everyone: the processes
        that share the layer's heads.
        """
        last = context.state["observed"]
        if self.heads == "each":
            return last
        last = last.nan_to_num(0.0)  # a head whose score is NaN must not make the layer's mean NaN
        everyone = context.parallel
        if context.aligned:  # slot i holds the same token in all heads
            return everyone.gather_heads(last).mean(1, keepdim=True).expand_as(last)
        # heads hold different tokens: sort all by position, and add their scores up in a bin for each position
        S, last = last.shape[-1], everyone.gather_heads(last, empty=0)
        B, H, _ = last.shape
        position, index = everyone.gather_heads(context.positions_BHT, empty=-1).flatten(1).sort(-1)
        change = position != position.roll(1, -1)
        bins = torch.empty_like(index).scatter_(-1, index, change.long().cumsum(-1) - 1)
        bins = bins.clamp(min=0)
        total = torch.zeros_like(last.flatten(1)).scatter_add_(1, bins, last.flatten(1))
        return everyone.select_heads((total / H).gather(-1, bins).view_as(last))[..., :S]


def check_pooling(kernel: object, pooling: object) -> None:
    """Raise KVPatchError unless `kernel` is an odd number and `pooling` "max", "avg" or None, for `ObservationWindow.check`."""
    if type(kernel) is not int or not 1 <= kernel <= MAX_POSITION or kernel % 2 == 0:
        raise KVPatchError(f"kernel={kernel!r} must be an odd number of tokens, 1 to {MAX_POSITION}, so that lengths stay.")
    if pooling not in ("max", "avg", None):
        raise KVPatchError(f"pooling={pooling!r} must be 'max', 'avg' or None.")


@dataclass(frozen=True)
class ObservationWindow(Score):
    """Attention of an observation window [SnapKV; CriticalKV Algorithm 2].

    s[i] = mean of a[t,i] over the last `window` rows t of the prompt, pooled over neighbouring tokens i with stride 1. The
    neighbours of a token are those that the head holds. The window's own tokens are kept (see scopes.py). If a prompt is
    read in blocks, the rows are the last ones of each block, or all rows of a shorter block.

    Differs from the paper: nothing.

    Attributes:
        window: query rows in the observation window.
        kernel: odd number of neighbouring tokens that are pooled.
        pooling: "max", "avg", or None for no pooling.
    """

    window: int = 32
    kernel: int = 7
    pooling: str | None = "max"
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    schedules: ClassVar[tuple[str, ...]] = ("prompt",)

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (WindowAttention(self.window, protected=True),)

    def check(self) -> None:
        check_count("window", self.window, "rows")
        check_pooling(self.kernel, self.pooling)

    def value(self, context: EvictionContext) -> Tensor:
        """Return the window's attention, pooled over neighbouring tokens, [B,H,T].

        `Policy.eviction_keys` calls it as a prompt ends. "observed": what WindowAttention has written.
        """
        score, position = context.state["observed"], context.positions_BHT
        if self.pooling is None:
            return score
        if not context.empty:
            return self._pool_scores(score, position, context)
        order = position.argsort(-1)  # text order, which puts empty slots first and leaves none between neighbours
        pooled = self._pool_scores(score.gather(-1, order), position.gather(-1, order), context)
        return torch.empty_like(pooled).scatter_(-1, order, pooled)

    def _may_pool(self, position: Tensor, context: EvictionContext) -> Tensor:
        """Return the tokens whose scores are pooled, bool [B,H,T]."""
        before = position <= context.newest_B11 - context.limits.observed
        return (position >= 0) & before if context.empty else before

    def _pool_scores(self, score: Tensor, position: Tensor, context: EvictionContext) -> Tensor:
        """Pool scores [B,H,T], in text order, over `kernel` neighbouring tokens outside the window, as `value` asks."""
        candidate = self._may_pool(position, context)
        if self.pooling == "avg":
            return F.avg_pool1d(score * candidate, self.kernel, stride=1, padding=self.kernel // 2)
        # F.max_pool1d pads with -inf; -inf also keeps padding tokens and the window's own tokens out of every maximum
        return F.max_pool1d(score.masked_fill(~candidate, -torch.inf), self.kernel, stride=1, padding=self.kernel // 2)


@dataclass(frozen=True)
class Defensive(ObservationWindow):
    """Greatest attention of an observation window [DefensiveKV].

    Each row of each query head is pooled over neighbouring tokens, as in ObservationWindow, and scaled so that its sum stays.
    s[i] = the greatest of the pooled a[t,i] over the last `window` rows t and the query heads of the group, but no less than
    the mean of these over all tokens before the window.

    Differs from the paper: rows are pooled before the maximum, as in the authors' code.

    Attributes:
        window: query rows in the observation window.
        kernel: odd number of neighbouring tokens that are pooled.
        pooling: "avg", "max", or None for no pooling.
    """

    kernel: int = 5
    pooling: str | None = "avg"

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (WindowAttention(self.window, self._reduce_rows, "max", protected=True),)

    def _reduce_rows(self, rows: Observed) -> Tensor:
        """Return the greatest pooled probability that a window's rows give each key, by KV head: [N,M].

        `WindowAttention.read` has it called, as its `fold`, for each block of the window's rows as a prompt ends.
        """
        candidate_NM = rows.candidate_NM  # True for tokens before the window
        p_NGRM = rows.p_NGRM * candidate_NM[:, None, None]
        if self.pooling is None:
            return p_NGRM.amax((1, 2))
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        pooled = pool(p_NGRM.flatten(0, 2)[:, None], self.kernel, stride=1, padding=self.kernel // 2).view_as(p_NGRM)
        pooled = pooled * candidate_NM[:, None, None]
        # scale each row to its sum before pooling
        total, pooled_total = p_NGRM.sum(-1, keepdim=True), pooled.sum(-1, keepdim=True)
        return (pooled * (total / pooled_total.clamp_min(torch.finfo(pooled.dtype).tiny))).amax((1, 2))

    def value(self, context: EvictionContext) -> Tensor:
        """Return the greatest pooled attention [B,H,T], but no less than its mean, for `Policy.eviction_keys`."""
        score, position = context.state["observed"], context.positions_BHT
        candidate = self._may_pool(position, context)
        mean = score.masked_fill(~candidate, 0.0).sum(-1, keepdim=True) / candidate.sum(-1, keepdim=True).clamp(min=1)
        return torch.maximum(score, mean)


@dataclass(frozen=True)
class GumbelSoftmax(Summed):
    """Keyformer's score [Keyformer eq. 9, 10, Algorithm 1].

    s[i] = sum over query rows of softmax((x + noise) / tau)[i], where x are the attention logits.

    Differs from the paper: rows of a batch share their noise (see noise.py).

    Attributes:
        scores: "all", or "sampled": sums from a sample of a long prompt's rows.
        noise: distribution, "gumbel", "gaussian", "constant" or "none". Noise is drawn per layer, query head and key when the
            key enters the cache.
        resample: draw noise anew for every query, as in the authors' code.
        tau: temperatures (init, end): init for rows of the prompt, then linear to end over the new tokens of generate().
        generation_length: new tokens to assume without generate().
        shared: keep one running sum for all layers, in layer order [Table 3].
        damping: factor in [0, 1] applied to the sum before each addition [2.3.3].
    """

    noise: str = "gumbel"
    resample: bool = False
    tau: tuple[float, float] = (1.0, 2.0)
    generation_length: int = 256
    shared: bool = False
    damping: float = 1.0

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        options = {name: getattr(self, name) for name in ("noise", "resample", "tau", "generation_length")}
        sampled = self.scores == "sampled"
        return (NoisySums(sampled=sampled, decay=self.damping, across_layers=self.shared, **options),)

    def unit(self, group: int) -> int:
        return group

    @kernel_value("gumbel")
    def value(self, context: EvictionContext) -> Tensor:
        return context.state["gumbel"]
