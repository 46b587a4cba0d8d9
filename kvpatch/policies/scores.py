"""How important is a cached token? One small frozen object per score of policies.md.

A score says which attention rows it wants to see (`rows`), which sums it keeps beside each key (`statistics`), what it
notes about a token when it enters (`entry`), and how these become a number per token (`value`). Attention probabilities
reach it a block of rows at a time, so no n x n matrix exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..errors import KVPatchError
from . import noise
from .budgets import check_count
from .context import Block, EvictionContext, accumulator
from .selection import MAX_POSITION

Rows = Literal["none", "window", "all"]
Form = str | None
Value = TypeVar("Value", bound=Callable[..., Tensor])


def kernel_value(form: Form | Callable[[Any], Form]) -> Callable[[Value], Value]:
    """Declare the form in which a fused decode kernel finds what a score's `value` computes.

    form: a state's name, "mean" (context.mean), "recency" (the position) or None; or a function of the score that gives one
    of these. It is bound to the decorated function: a subclass with a `value` of its own is unknown to kernels, and torch
    asks it.
    """

    def declare(value: Value) -> Value:
        vars(value)["kernel_value"] = (value, form)
        return value

    return declare


@dataclass(frozen=True)
class Score:
    """Base: a score that needs no attention and keeps nothing. Subclasses are frozen; their fields are their options.

    rows: which query rows of the prompt it must see: none, the last few ("window"), or all.
    statistics: names in statistics.STATISTICS, summed over those rows beside each key.
    schedules: when the score is defined. protects_window: the rows of the tail are kept. entry_by_position: `entry` looks
    at positions alone, so that it can be computed ahead. signed: values may be negative; False saves
    a step. is_weight: values are never negative and stand in proportion, so that two-stage selection may multiply them.
    """

    rows: ClassVar[Rows] = "none"
    statistics: ClassVar[tuple[str, ...]] = ()
    schedules: ClassVar[tuple[str, ...]] = ("prompt", "decode", "both")
    protects_window: ClassVar[bool] = False
    entry_by_position: ClassVar[bool] = False
    signed: ClassVar[bool] = True
    is_weight: ClassVar[bool] = False

    @property
    def observed_rows(self) -> int:
        """How many of the last rows `rows == "window"` wants."""
        return 0

    @property
    def stored(self) -> str | None:
        """The form in which a fused decode kernel finds the value, as @kernel_value declares it; None: only torch can."""
        value, form = getattr(type(self).value, "kernel_value", (None, None))
        if value is not type(self).value:  # a wrapper may have taken over the attributes of what it wraps
            return None
        return form(self) if callable(form) else form

    @property
    def fresh(self) -> bool:
        """Noise is drawn for every query and key, so that none is kept."""
        return False

    @property
    def decay(self) -> float:
        """Multiplies the statistics before each addition."""
        return 1.0

    @property
    def across_layers(self) -> bool:
        """One running sum for all layers."""
        return False

    def temperature(self, step: int | Tensor, length: int | Tensor | None) -> float | Tensor:
        """tau at decode step `step` (0: prompt rows); `length` is generate()'s number of new tokens. A tensor where the step
        is one."""
        return 1.0

    def entry(
        self, k_BHQD: Tensor, positions_BQ: Tensor, group: int, layer: int | Tensor, seed: int, first: int = 0
    ) -> dict[str, Tensor]:
        """Notes about tokens when they enter, by name: [B,H,Q] or [B,H,Q,G]. layer: a number, or one per row [B]. first: the
        number of the first head, where others are on other processes. "noise" [B,H,Q,G], exp(noise) >= 0, weighs the
        probabilities of the statistic "gumbel"."""
        return {}

    def check(self) -> None:
        """Raise KVPatchError for an option out of range."""

    def value(self, context: EvictionContext) -> Tensor:
        """Scores [B,H,T]; whatever stands in empty slots is ignored."""
        raise NotImplementedError


@dataclass(frozen=True)
class Random(Score):
    """Random eviction [RoCo, baselines].

    s[i] = a fresh uniform number at every eviction. Differs from the paper: nothing.
    """

    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True

    def value(self, context: EvictionContext) -> Tensor:
        H = context.positions_BHT.shape[1]
        head = context.parallel.first(H) + torch.arange(H, device=context.positions_BHT.device)
        return noise.uniform(context.seed, context.layer, head[None, :, None], context.newest_B11, context.positions_BHT)


@dataclass(frozen=True)
class Recency(Score):
    """Window attention [RoCo 4.1]. s[i] = i. Differs from the paper: nothing."""

    signed: ClassVar[bool] = False

    @kernel_value("recency")
    def value(self, context: EvictionContext) -> Tensor:
        return context.positions_BHT.float()


@dataclass(frozen=True)
class DilatedRecency(Score):
    """Dilated window [Keyformer Figure 2; Longformer]. Tokens at positions divisible by dilation + 1 by recency, before
    all others by recency.

    Differs from the paper: the lattice stands still in the text (a cache cannot bring back what a moving one skipped).
    """

    dilation: int = 1

    def check(self) -> None:
        if isinstance(self.dilation, bool) or not isinstance(self.dilation, int) or not 0 <= self.dilation <= MAX_POSITION:
            raise KVPatchError(f"dilation={self.dilation!r} must be a whole number of tokens skipped, 0 to {MAX_POSITION}.")

    def value(self, context: EvictionContext) -> Tensor:
        position = context.positions_BHT
        on_lattice = position % (self.dilation + 1) == 0
        return torch.where(on_lattice, position, position - context.newest_B11 - 1).float()


@dataclass(frozen=True)
class Accumulated(Score):
    """AAS [H2O; RoCo 4.1].

    s[i] = sum over query rows of a[t,i], prompt rows included. Differs from the paper: nothing.
    """

    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rows: ClassVar[Rows] = "all"
    statistics: ClassVar[tuple[str, ...]] = ("sum",)

    @kernel_value("sum")
    def value(self, context: EvictionContext) -> Tensor:
        return context.state["sum"]


@dataclass(frozen=True)
class AccumulatedQuantized(Score):
    """AQAS [ScissorHands; RoCo 4.1]. s[i] = number of rows with a[t,i] > 1/(keys that t attends to).

    Differs from the paper: no history window; with grouped queries the indicator is per query head, then averaged.
    """

    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rows: ClassVar[Rows] = "all"
    statistics: ClassVar[tuple[str, ...]] = ("count",)

    @kernel_value("count")
    def value(self, context: EvictionContext) -> Tensor:
        return context.state["count"] / context.group


@dataclass(frozen=True)
class Mean(Score):
    """MAS [RoCo 4.3].

    s[i] = sum over rows of a[t,i] / c[i], c[i] the rows that could see i. Differs from the paper: nothing.
    """

    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rows: ClassVar[Rows] = "all"
    statistics: ClassVar[tuple[str, ...]] = ("sum",)

    @kernel_value("mean")
    def value(self, context: EvictionContext) -> Tensor:
        return context.mean


@dataclass(frozen=True)
class Last(Score):
    """LTAS [TOVA; RoCo 4.1]. s[i] = a[T,i] of the newest row T.

    heads="layer" averages over all heads of the layer and keeps one set for them, as TOVA's paper and code do;
    heads="each" keeps one set per KV head, as RoCo's baseline does. Differs from the paper: nothing.
    """

    heads: str = "layer"
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rows: ClassVar[Rows] = "window"

    @property
    def observed_rows(self) -> int:
        return 1

    def check(self) -> None:
        if self.heads not in ("layer", "each"):
            raise KVPatchError(f"heads={self.heads!r} must be 'layer' (one kept set per layer) or 'each'.")

    @kernel_value(lambda score: "tail" if score.heads == "each" else None)
    def value(self, context: EvictionContext) -> Tensor:
        last = context.state["tail"]
        if self.heads == "each":
            return last
        last = last.nan_to_num(0.0)  # a head without a number has no say in the layer's mean
        everyone = context.parallel
        if context.aligned:
            return everyone.heads(last).mean(1, keepdim=True).expand_as(last)
        # heads hold different tokens: added up by position, in as many bins as there are slots
        S, last = last.shape[-1], everyone.heads(last, empty=0)
        B, H, _ = last.shape
        position, index = everyone.heads(context.positions_BHT, empty=-1).flatten(1).sort(-1)
        change = position != position.roll(1, -1)
        bins = torch.empty_like(index).scatter_(-1, index, change.long().cumsum(-1) - 1)
        bins = bins.clamp(min=0)
        total = torch.zeros_like(last.flatten(1)).scatter_add_(1, bins, last.flatten(1))
        return everyone.own((total / H).gather(-1, bins).view_as(last))[..., :S]


@dataclass(frozen=True)
class ObservationWindow(Score):
    """SnapKV's score [SnapKV; CriticalKV Algorithm 2]: mean over the last `window` prompt rows of a[t,i], pooled over i.

    Each query head's row is averaged over its group first, then pooled; the window's own tokens are kept (see scopes).
    pooling: "max" | "avg" | None, kernel odd, stride 1; neighbours are those that the head holds. Where a prompt is read in
    blocks the rows are each block's last ones; a block with fewer rows than `window` has a window of them all. Differs from
    the paper: nothing.
    """

    window: int = 32
    kernel: int = 7
    pooling: str | None = "max"
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rows: ClassVar[Rows] = "window"
    schedules: ClassVar[tuple[str, ...]] = ("prompt",)
    protects_window: ClassVar[bool] = True

    @property
    def observed_rows(self) -> int:
        return self.window

    def check(self) -> None:
        check_count("window", self.window, "rows")
        if type(self.kernel) is not int or not 1 <= self.kernel <= MAX_POSITION or self.kernel % 2 == 0:
            raise KVPatchError(
                f"kernel={self.kernel!r} must be an odd number of tokens, 1 to {MAX_POSITION}, so that lengths stay."
            )
        if self.pooling not in ("max", "avg", None):
            raise KVPatchError(f"pooling={self.pooling!r} must be 'max', 'avg' or None.")

    def value(self, context: EvictionContext) -> Tensor:
        score, position = context.state["tail"], context.positions_BHT
        if self.pooling is None:
            return score
        if not context.empty:
            return self._pooled(score, position, context)
        order = position.argsort(-1)  # neighbours in what is held, with no empty slots between them
        pooled = self._pooled(score.gather(-1, order), position.gather(-1, order), context)
        return torch.empty_like(pooled).scatter_(-1, order, pooled)

    def _pooled(self, score: Tensor, position: Tensor, context: EvictionContext) -> Tensor:
        candidate = (position >= 0) & (position <= context.newest_B11 - context.limits.observed)
        if self.pooling == "avg":
            return F.avg_pool1d(score * candidate, self.kernel, stride=1, padding=self.kernel // 2)
        # F.max_pool1d pads with -inf, so padding never wins; neither do pads, nor the window's own tokens
        outside = score.masked_fill(~candidate, -torch.inf)
        return F.max_pool1d(outside, self.kernel, stride=1, padding=self.kernel // 2)


@dataclass(frozen=True)
class GumbelSoftmax(Score):
    """Keyformer [eq. 9, 10, Algorithm 1]. s[i] = sum over rows of softmax((x + noise) / tau)[i].

    noise: "gumbel" | "gaussian" | "constant" | "none", one draw per layer, query head and key when the key enters;
    resample=True draws afresh for every query, as the authors' code does. tau=(init, end): init for prompt rows, then
    linearly to end over generate()'s number of new tokens (`generation_length` where there is no generate()).
    shared: one running sum for all layers, in layer order [Table 3]. damping multiplies the old score [2.3.3].
    Differs from the paper: rows of a batch share their draws (see noise.py).
    """

    noise: str = "gumbel"
    resample: bool = False
    tau: tuple[float, float] = (1.0, 2.0)
    generation_length: int = 256
    shared: bool = False
    damping: float = 1.0
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rows: ClassVar[Rows] = "all"
    statistics: ClassVar[tuple[str, ...]] = ("gumbel",)
    entry_by_position: ClassVar[bool] = True

    @property
    def decay(self) -> float:
        return self.damping

    @property
    def across_layers(self) -> bool:
        return self.shared

    @property
    def fresh(self) -> bool:
        return self.resample and self.noise in ("gumbel", "gaussian")

    def check(self) -> None:
        if self.noise not in ("gumbel", "gaussian", "constant", "none"):
            raise KVPatchError(f"noise={self.noise!r} must be 'gumbel', 'gaussian', 'constant' or 'none'.")
        if not (isinstance(self.tau, tuple | list) and len(self.tau) == 2 and all(map(_is_temperature, self.tau))):
            raise KVPatchError(f"tau={self.tau!r} must be two positive temperatures (init, end), such as (1.0, 2.0).")
        check_count("generation_length", self.generation_length, "tokens")
        for name, value in (("resample", self.resample), ("shared", self.shared)):
            if not isinstance(value, bool):
                raise KVPatchError(f"{name}={value!r} must be True or False.")
        if isinstance(self.damping, bool) or not isinstance(self.damping, int | float) or not 0.0 <= self.damping <= 1.0:
            raise KVPatchError(f"damping={self.damping!r} must be in [0, 1]; 1.0 does not damp.")

    def temperature(self, step: int | Tensor, length: int | Tensor | None) -> float | Tensor:
        first, last = self.tau
        if isinstance(step, Tensor) and isinstance(length, Tensor):
            return first if first == last else first + torch.minimum(step, length) * (last - first) / length
        assert not isinstance(length, Tensor)
        length = length or self.generation_length
        return first + min(step, length) * (last - first) / length

    def _distributed(self, u: Tensor) -> Tensor:
        return noise.gumbel(u) if self.noise == "gumbel" else noise.gaussian(u)

    def draw_for_rows(self, block: Block) -> Tensor:
        """Fresh noise [N,G,R,M] for every query and key of a block."""
        head, row, key = block.place()
        head, row, key = head[:, :, None, None], row[:, None, :, None], key[:, None, None, :]
        return self._distributed(noise.uniform(block.seed, block.layer, head, row, key))

    def entry(
        self, k_BHQD: Tensor, positions_BQ: Tensor, group: int, layer: int | Tensor, seed: int, first: int = 0
    ) -> dict[str, Tensor]:
        if self.noise == "none" or self.fresh:
            return {}
        B, H, Q = k_BHQD.shape[:3]
        if self.noise == "constant":
            return {"noise": torch.full((B, H, Q, group), noise.GUMBEL_MEAN, device=k_BHQD.device).exp()}
        head = rearrange(first * group + torch.arange(H * group, device=k_BHQD.device), "(h g) -> 1 h 1 g", g=group)
        layer = rearrange(layer, "b -> b 1 1 1") if isinstance(layer, Tensor) else layer
        u = noise.uniform(seed, layer, head, -1, rearrange(positions_BQ, "b q -> b 1 q 1"))
        return {"noise": self._distributed(u).exp()}  # that is how it is used, at every step

    @kernel_value("gumbel")
    def value(self, context: EvictionContext) -> Tensor:
        return context.state["gumbel"]


def _is_temperature(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


@dataclass(frozen=True)
class KeyNorm(Score):
    """s[i] = -||k_i||_2 of the cached key: a cheap baseline that needs no attention."""

    def entry(
        self, k_BHQD: Tensor, positions_BQ: Tensor, group: int, layer: int | Tensor, seed: int, first: int = 0
    ) -> dict[str, Tensor]:
        return {"key_norm": torch.linalg.vector_norm(k_BHQD, dim=-1, dtype=accumulator(k_BHQD.dtype))}

    def value(self, context: EvictionContext) -> Tensor:
        return -context.state["key_norm"]
