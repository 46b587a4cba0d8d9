"""How important is a cached token? One small frozen object per score of policies.md.

A score says which attention rows it wants to see (`rows`), which sums it keeps beside each key (`statistics`), what it
notes about a token when it enters (`entry`), and how these become a number per token (`value`). Attention probabilities
reach it a block of rows at a time, so no n x n matrix exists.

Dimension key (see kvpatch/__init__.py): N = any part of B*H, R rows of a block, M keys of a block, S slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..errors import KVPatchError
from . import noise

Rows = Literal["none", "tail", "all"]


@dataclass
class Moment:
    """What is known when scores are read: of one layer, at the end of a prompt or of a decode step. (Or of several layers
    stacked along B; then layer is [B,1,1].)

    positions_BHS (-1: empty slot) and the state's tensors lie slot by slot as the keys do, in text order at the end of a
    prompt. newest_B11 is the newest token's position, so that `newest - positions` is an age; tokens above recent_B11 are
    in the protected window. limits holds each row's protected sizes. group is G; sliding is the attention window in
    tokens, or None. empty: some slots may be empty. seen: columns that went through the cache. aligned: all heads hold
    the same tokens in the same slots where their scores are the same.

    For a selection that asks: keep_BH1, tokens that each head may hold, and norms(known, out), the projected value norms
    [B,H,S], which need not be right where a mask says that they are not wanted.
    """

    layer: int | Tensor
    seed: int
    positions_BHS: Tensor
    newest_B11: Tensor
    recent_B11: Tensor
    state: dict[str, Tensor]
    limits: Limits
    group: int
    sliding: int | None
    empty: bool
    seen: int = 0
    aligned: bool = True
    keep_BH1: Tensor | None = None
    norms: Callable[[Tensor, Tensor | None], Tensor] | None = None

    @functools.cached_property
    def rows_seen(self) -> Tensor:
        """c [B,H,S]: how many query rows could see each token so far, its own included; of the sums' dtype."""
        seen = (self.newest_B11 + 1 - self.positions_BHS).to(self.state["sum"].dtype)
        return seen if self.sliding is None else seen.clamp(max=self.sliding)

    @functools.cached_property
    def mean(self) -> Tensor:
        """Mean probability [B,H,S] that each token got from the rows that could see it."""
        mean = self.state["sum"] / self.rows_seen
        return mean if self.group == 1 else mean.div_(self.group)


@dataclass
class Limits:
    """Sizes in tokens, clamped row by row so that the kept set is exactly the budget; int64 [B,1,1].

    first: tokens below this position are protected (sinks, or a prompt that is kept whole). newest: so many newest ones
    are. prompt: positions below it take no part in rankings (schedule "decode"). deviation: RoCo's r. tail: rows of the
    observation window. The rest is known to the host, so that nothing is computed for a size of zero; deviation_count is
    r where it is one for all rows.
    """

    first: Tensor
    newest: Tensor
    prompt: Tensor
    deviation: Tensor
    tail: Tensor
    nominal: list[int]
    any_first: bool
    any_newest: bool
    any_prompt: bool
    deviation_count: int | None

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]], device: torch.device) -> Limits:
        """From one tuple (first, newest, prompt, deviation, tail, nominal) per row."""
        first, newest, prompt, deviation, _, nominal = zip(*rows, strict=True)
        count = deviation[0] if len(set(deviation)) == 1 else None
        sizes = torch.tensor(rows, device=device).T.reshape(6, len(rows), 1, 1)
        flags = any(first), any(newest), any(prompt)
        return cls(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], list(nominal), *flags, count)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> Limits:
        """The same with every tensor changed along its batch axis."""
        changed: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **changed)


@dataclass
class Block:
    """Attention probabilities of some query rows, and what a statistic may need beside them.

    p_NGRM sums to one over M (to zero in rows of padding). keys_NR: how many keys each row attends to. noise_NMG: the
    score's own entry for these keys. place() gives query heads [N,G] and positions of rows [N,R] and keys [N,M], for
    fresh noise.
    """

    p_NGRM: Tensor
    keys_NR: Tensor | None
    noise_NMG: Tensor | None
    place: Callable[[], tuple[Tensor, Tensor, Tensor]]
    tau: float
    layer: int | Tensor
    seed: int


# ---- statistics: name -> increments [N,M] summed over the rows of a block and the query heads of a group ----


def _sum(block: Block, score: Score) -> Tensor:
    return block.p_NGRM.sum((1, 2))


def _squares(block: Block, score: Score) -> Tensor:
    """Squares of the group's mean probability (policies.md: squares are taken of the averaged probability)."""
    mean_NRM = block.p_NGRM.mean(1)
    return mean_NRM.square().sum(1)


def _count(block: Block, score: Score) -> Tensor:
    """Rows that give the key more than an even share. Summed, not averaged, over the group: whole numbers stay exact."""
    assert block.keys_NR is not None
    above = block.p_NGRM * block.keys_NR[:, None, :, None] > 1.0
    return above.to(block.p_NGRM.dtype).sum((1, 2))


def _gumbel(block: Block, score: Score) -> Tensor:
    """softmax((x + noise) / tau) from p = softmax(x): proportional to (p * exp(noise)) ** (1 / tau)."""
    assert isinstance(score, GumbelSoftmax)
    p, weight = block.p_NGRM, None
    if score.fresh:
        p = p * torch.exp(score.draw_for_rows(block))
    elif block.noise_NMG is not None:
        weight = rearrange(block.noise_NMG, "n m g -> n g 1 m").to(p.dtype)
    if weight is not None and block.tau == 1.0:
        # no second matrix: column sums of p*w / rowsum(p*w) are two matrix-vector products
        total = (p @ weight.transpose(-1, -2)).clamp_min(_TINY)
        return ((total.reciprocal().transpose(-1, -2) @ p) * weight).sum((1, 2))
    p = p if weight is None else p * weight
    if block.tau == 1.0:
        return (p / p.sum(-1, keepdim=True).clamp_min(_TINY)).sum((1, 2))
    # a row of padding is -inf throughout, and NaN after the softmax
    return p.log().div_(block.tau).softmax(-1).nan_to_num_(0.0).sum((1, 2))


_TINY = 1e-30  # a row without keys (padding) divides zero by this
STATISTICS: dict[str, Callable[[Block, Score], Tensor]] = {
    "sum": _sum,
    "squares": _squares,
    "count": _count,
    "gumbel": _gumbel,
}


# ---- scores ----


@dataclass(frozen=True)
class Score:
    """Base: a score that needs no attention and keeps nothing. Subclasses are frozen; their fields are their options.

    rows: which query rows of the prompt it must see: none, the last few ("tail"), or all.
    statistics: names in STATISTICS, summed over those rows beside each key.
    schedules: when the score is defined. protects_tail: the rows of the tail are kept. entry_by_position: `entry` looks
    at positions alone, so that it can be computed ahead. signed: values may be negative; False saves
    a step. is_weight: values are never negative and stand in proportion, so that two-stage selection may multiply them.
    """

    rows: ClassVar[Rows] = "none"
    statistics: ClassVar[tuple[str, ...]] = ()
    schedules: ClassVar[tuple[str, ...]] = ("prompt", "decode", "both")
    protects_tail: ClassVar[bool] = False
    entry_by_position: ClassVar[bool] = False
    signed: ClassVar[bool] = True
    is_weight: ClassVar[bool] = False

    @property
    def tail(self) -> int:
        """How many of the last rows `rows == "tail"` wants."""
        return 0

    @property
    def decay(self) -> float:
        """Multiplies the statistics before each addition."""
        return 1.0

    @property
    def across_layers(self) -> bool:
        """One running sum for all layers."""
        return False

    def temperature(self, step: int, length: int | None) -> float:
        """tau at decode step `step` (0: prompt rows); `length` is generate()'s number of new tokens."""
        return 1.0

    def entry(self, k_BHQD: Tensor, positions_BQ: Tensor, group: int, layer: int | Tensor, seed: int) -> dict[str, Tensor]:
        """Notes about tokens when they enter, by name: [B,H,Q] or [B,H,Q,G]. layer: a number, or one per row [B]."""
        return {}

    def check(self) -> None:
        """Raise KVPatchError for an option out of range."""

    def value(self, moment: Moment) -> Tensor:
        """Scores [B,H,S]; whatever stands in empty slots is ignored."""
        raise NotImplementedError


@dataclass(frozen=True)
class Random(Score):
    """Random eviction [RoCo, baselines].

    s[i] = a fresh uniform number at every eviction. Differs from the paper: nothing.
    """

    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True

    def value(self, moment: Moment) -> Tensor:
        head = torch.arange(moment.positions_BHS.shape[1], device=moment.positions_BHS.device)
        return noise.uniform(moment.seed, moment.layer, head[None, :, None], moment.newest_B11, moment.positions_BHS)


@dataclass(frozen=True)
class Recency(Score):
    """Window attention [RoCo 4.1]. s[i] = i. Differs from the paper: nothing."""

    signed: ClassVar[bool] = False

    def value(self, moment: Moment) -> Tensor:
        return moment.positions_BHS.float()


@dataclass(frozen=True)
class DilatedRecency(Score):
    """Dilated window [Keyformer Figure 2; Longformer]. Tokens at positions divisible by dilation + 1 by recency, before
    all others by recency.

    Differs from the paper: the lattice stands still in the text (a cache cannot bring back what a moving one skipped).
    """

    dilation: int = 1
    def check(self) -> None:
        if not isinstance(self.dilation, int) or self.dilation < 0:
            raise KVPatchError(f"dilation={self.dilation!r} must be a whole number of tokens skipped, 0 or more.")

    def value(self, moment: Moment) -> Tensor:
        position = moment.positions_BHS
        on_lattice = position % (self.dilation + 1) == 0
        return torch.where(on_lattice, position, position - moment.newest_B11 - 1).float()


@dataclass(frozen=True)
class Accumulated(Score):
    """AAS [H2O; RoCo 4.1].

    s[i] = sum over query rows of a[t,i], prompt rows included. Differs from the paper: nothing.
    """

    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rows: ClassVar[Rows] = "all"
    statistics: ClassVar[tuple[str, ...]] = ("sum",)

    def value(self, moment: Moment) -> Tensor:
        return moment.state["sum"]


@dataclass(frozen=True)
class AccumulatedQuantized(Score):
    """AQAS [ScissorHands; RoCo 4.1]. s[i] = number of rows with a[t,i] > 1/(keys that t attends to).

    Differs from the paper: no history window; with grouped queries the indicator is per query head, then averaged.
    """

    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rows: ClassVar[Rows] = "all"
    statistics: ClassVar[tuple[str, ...]] = ("count",)

    def value(self, moment: Moment) -> Tensor:
        return moment.state["count"] / moment.group


@dataclass(frozen=True)
class Mean(Score):
    """MAS [RoCo 4.3].

    s[i] = sum over rows of a[t,i] / c[i], c[i] the rows that could see i. Differs from the paper: nothing.
    """

    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rows: ClassVar[Rows] = "all"
    statistics: ClassVar[tuple[str, ...]] = ("sum",)

    def value(self, moment: Moment) -> Tensor:
        return moment.mean


@dataclass(frozen=True)
class Last(Score):
    """LTAS [TOVA; RoCo 4.1]. s[i] = a[T,i] of the newest row T.

    heads="layer" averages over all heads of the layer and keeps one set for them, as TOVA's paper and code do;
    heads="each" keeps one set per KV head, as RoCo's baseline does. Differs from the paper: nothing.
    """

    heads: str = "layer"
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rows: ClassVar[Rows] = "tail"

    @property
    def tail(self) -> int:
        return 1

    def check(self) -> None:
        if self.heads not in ("layer", "each"):
            raise KVPatchError(f"heads={self.heads!r} must be 'layer' (one kept set per layer) or 'each'.")

    def value(self, moment: Moment) -> Tensor:
        last = moment.state["tail"]
        if self.heads == "each":
            return last
        if moment.aligned:
            return last.mean(1, keepdim=True).expand_as(last)
        # heads hold different tokens: added up by position
        B, H, _ = last.shape
        at = moment.positions_BHS + 1  # column 0 is the empty slots'
        total = last.new_zeros(B, moment.seen + 1).scatter_add_(1, at.flatten(1), last.flatten(1))
        return (total / H)[:, None].expand(-1, H, -1).gather(-1, at)


@dataclass(frozen=True)
class ObservationWindow(Score):
    """SnapKV's score [SnapKV; CriticalKV Algorithm 2]: mean over the last `window` prompt rows of a[t,i], pooled over i.

    Each query head's row is averaged over its group first, then pooled; the window's own tokens are kept (see scopes).
    pooling: "max" | "avg" | None, kernel odd, stride 1. Differs from the paper: nothing.
    """

    window: int = 32
    kernel: int = 7
    pooling: str | None = "max"
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    rows: ClassVar[Rows] = "tail"
    schedules: ClassVar[tuple[str, ...]] = ("prompt",)
    protects_tail: ClassVar[bool] = True

    @property
    def tail(self) -> int:
        return self.window

    def check(self) -> None:
        if not isinstance(self.window, int) or self.window < 1:
            raise KVPatchError(f"window={self.window!r} must be a number of rows, at least 1.")
        if not isinstance(self.kernel, int) or self.kernel < 1 or self.kernel % 2 == 0:
            raise KVPatchError(
                f"kernel={self.kernel!r} must be an odd number of tokens, so that pooling keeps the length."
            )
        if self.pooling not in ("max", "avg", None):
            raise KVPatchError(f"pooling={self.pooling!r} must be 'max', 'avg' or None.")

    def value(self, moment: Moment) -> Tensor:
        score, position = moment.state["tail"], moment.positions_BHS
        if self.pooling is None:
            return score
        if not moment.empty:
            return self._pooled(score, position, moment)
        order = position.argsort(-1)  # neighbours in what is held, with no empty slots between them
        pooled = self._pooled(score.gather(-1, order), position.gather(-1, order), moment)
        return torch.empty_like(pooled).scatter_(-1, order, pooled)

    def _pooled(self, score: Tensor, position: Tensor, moment: Moment) -> Tensor:
        candidate = (position >= 0) & (position <= moment.newest_B11 - moment.limits.tail)
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
        """Noise drawn for every query and key, so that none is kept."""
        return self.resample and self.noise in ("gumbel", "gaussian")

    def check(self) -> None:
        if self.noise not in ("gumbel", "gaussian", "constant", "none"):
            raise KVPatchError(f"noise={self.noise!r} must be 'gumbel', 'gaussian', 'constant' or 'none'.")
        if not (isinstance(self.tau, tuple | list) and len(self.tau) == 2 and all(t > 0 for t in self.tau)):
            raise KVPatchError(f"tau={self.tau!r} must be two positive temperatures (init, end), such as (1.0, 2.0).")
        if not isinstance(self.generation_length, int) or self.generation_length < 1:
            raise KVPatchError(f"generation_length={self.generation_length!r} must be a number of tokens, at least 1.")
        if not 0.0 <= self.damping <= 1.0:
            raise KVPatchError(f"damping={self.damping!r} must be in [0, 1]; 1.0 does not damp.")

    def temperature(self, step: int, length: int | None) -> float:
        first, last = self.tau
        length = length or self.generation_length
        return first + min(step, length) * (last - first) / length

    def _distributed(self, u: Tensor) -> Tensor:
        return noise.gumbel(u) if self.noise == "gumbel" else noise.gaussian(u)

    def draw_for_rows(self, block: Block) -> Tensor:
        """Fresh noise [N,G,R,M] for every query and key of a block."""
        head, row, key = block.place()
        head, row, key = head[:, :, None, None], row[:, None, :, None], key[:, None, None, :]
        return self._distributed(noise.uniform(block.seed, block.layer, head, row, key))

    def entry(self, k_BHQD: Tensor, positions_BQ: Tensor, group: int, layer: int | Tensor, seed: int) -> dict[str, Tensor]:
        if self.noise == "none" or self.fresh:
            return {}
        B, H, Q = k_BHQD.shape[:3]
        if self.noise == "constant":
            return {"noise": torch.full((B, H, Q, group), noise.GUMBEL_MEAN, device=k_BHQD.device).exp()}
        head = rearrange(torch.arange(H * group, device=k_BHQD.device), "(h g) -> 1 h 1 g", g=group)
        layer = rearrange(layer, "b -> b 1 1 1") if isinstance(layer, Tensor) else layer
        u = noise.uniform(seed, layer, head, -1, rearrange(positions_BQ, "b q -> b 1 q 1"))
        return {"noise": self._distributed(u).exp()}  # that is how it is used, at every step

    def value(self, moment: Moment) -> Tensor:
        return moment.state["gumbel"]


@dataclass(frozen=True)
class KeyNorm(Score):
    """s[i] = -||k_i||_2 of the cached key: a cheap baseline that needs no attention."""

    def entry(self, k_BHQD: Tensor, positions_BQ: Tensor, group: int, layer: int | Tensor, seed: int) -> dict[str, Tensor]:
        return {"key_norm": torch.linalg.vector_norm(k_BHQD, dim=-1, dtype=accumulator(k_BHQD.dtype))}

    def value(self, moment: Moment) -> Tensor:
        return -moment.state["key_norm"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Scores are float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)
