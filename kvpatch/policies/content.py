"""Scores of keys and values alone: they need no attention, so they work with any attention kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KVPatchError
from . import noise
from .budgets import check_count, is_number
from .context import EvictionContext, NewTokens, accumulator
from .needs import AnyNeed, ChunkAttention, Held, PlainKeys
from .parallel import Parallel
from .scores import Score


@dataclass(frozen=True)
class KeyNorm(Score):
    """Key norm [L2-norm baseline]: needs no attention.

    s[i] = -||k_i||_2 of the cached key.
    """

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        return {"key_norm": torch.linalg.vector_norm(new.k_BHQD, dim=-1, dtype=accumulator(new.k_BHQD.dtype))}

    def value(self, context: EvictionContext) -> Tensor:
        return -context.state["key_norm"]


@dataclass(frozen=True)
class KeyDiff(Score):
    """Dissimilarity to the mean key [KeyDiff].

    s[i] = -cos(k_i, mean over the held tokens j of k_j / ||k_j||).

    Differs from the paper: nothing; its blocks are `block=`.
    """

    needs = (Held(),)

    def value(self, context: EvictionContext) -> Tensor:
        """Return minus each key's cosine to the head's mean key [B,H,T]. `Policy.eviction_keys` calls it at each eviction."""
        keys = context.view(Held)[0]
        direction = F.normalize(keys.to(accumulator(keys.dtype)), dim=-1)
        if context.empty:
            direction = direction.masked_fill((context.positions_BHT < 0)[..., None], 0.0)
        # the mean and the sum point the same way
        return -(direction * F.normalize(direction.sum(2, keepdim=True), dim=-1)).sum(-1)


Combine = Literal["product", "mean", "key", "value"]


@dataclass(frozen=True)
class Cur(Score):
    """Norms of keys and values, each relative to its neighbourhood [CurDKV].

    s[i] = K_i * V_i with K_i = ||k_i||^2 / (sum over i's window of ||k_j||^2), and V_i likewise of the values. The windows are
    consecutive `window` tokens in text order, of those that the head holds.

    Differs from the paper: norms without a random projection, as in the code of kvpress.

    Attributes:
        window: tokens of a window.
        combine: "product", or "mean" of K and V, or "key" or "value" for one of them.
    """

    window: int = 16
    combine: Combine = "product"
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True

    def check(self) -> None:
        check_count("window", self.window, "tokens")
        if self.combine not in ("product", "mean", "key", "value"):
            raise KVPatchError(f"combine={self.combine!r} must be 'product', 'mean', 'key' or 'value'.")

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        dtype = accumulator(new.k_BHQD.dtype)
        return {name: t.to(dtype).square().sum(-1) for name, t in (("key_square", new.k_BHQD), ("value_square", new.v_BHQD))}

    def value(self, context: EvictionContext) -> Tensor:
        """Return each token's share of its window's squared norms [B,H,T], for `Policy.eviction_keys` at each eviction."""
        order, _ = sort_by_position(context.positions_BHT)
        K, V = (self._compare_neighbours(context.state[name], order, context) for name in ("key_square", "value_square"))
        combined = {"product": K * V, "mean": (K + V) / 2, "key": K, "value": V}[self.combine]
        return torch.empty_like(combined).scatter_(-1, order, combined)

    def _compare_neighbours(self, square: Tensor, order: Tensor, context: EvictionContext) -> Tensor:
        """Divide each token's squared norm by the sum over its window, for `value`: shares [B,H,T] in text `order`."""
        T = square.shape[-1]
        square = square.masked_fill(context.positions_BHT < 0, 0.0) if context.empty else square
        windows = F.pad(square.gather(-1, order), (0, -T % self.window)).unflatten(-1, (-1, self.window))
        total = windows.sum(-1, keepdim=True).clamp_min(torch.finfo(square.dtype).tiny)
        return (windows / total).flatten(-2)[..., :T]


@dataclass(frozen=True)
class LagKV(Score):
    """Deviation of keys and values, relative to the tokens that follow [LagKV].

    The tokens after the sinks are cut into partitions of `lag` in text order. A token's key is scaled channel by channel to the
    least and the greatest value of the next partition; a channel that is constant there is 0. d_i is the standard deviation
    of the result over the channels, and e_i the softmax of d over the partition; likewise of the values. s[i] = the rank
    inside the partition of the mean of both e_i, divided by `lag`. The last whole partition and what follows it, and sinks,
    have 1. If there are fewer than two whole partitions, s[i] = i.

    Differs from the paper: a constant channel, by whose range the paper and its code divide.

    Attributes:
        lag: tokens of a partition.
    """

    lag: int = 128
    needs = (Held(),)
    signed: ClassVar[bool] = False
    schedules: ClassVar[tuple[str, ...]] = ("prompt",)

    def check(self) -> None:
        check_count("lag", self.lag, "tokens")

    def value(self, context: EvictionContext) -> Tensor:
        """Return each token's rank in its partition, over `lag`; 1 for sinks and from the last whole partition on: [B,H,T].

        `Policy.eviction_keys` calls it as a prompt ends. Partitions are `lag` tokens each, after the sinks (first tokens). With
        fewer than two, the score is the token's index in text order.
        """
        position = context.positions_BHT
        # each head's number of whole partitions, and each slot's place after the sinks, in text order
        order, n_BH1 = sort_by_position(position)
        sinks_BH1 = ((position >= 0) & (position < context.limits.first)).sum(-1, keepdim=True)
        partitions_BH1 = (n_BH1 - sinks_BH1) // self.lag
        rank = torch.arange(position.shape[-1], device=position.device)
        place = rank - sinks_BH1  # counted from the first token after the sinks
        score = torch.ones(position.shape, dtype=accumulator(context.view(Held)[0].dtype), device=position.device)
        # rank the tokens of all whole partitions but the last
        P = int(partitions_BH1.max())
        if P > 1:
            index = (sinks_BH1 + torch.arange(P * self.lag, device=position.device)).clamp(max=position.shape[-1] - 1)
            index = order.gather(-1, index)[..., None]
            ranks = self._rank_tokens([t.take_along_dim(index, 2) for t in context.view(Held)]) / self.lag
            scored = (place >= 0) & (place < (partitions_BH1 - 1) * self.lag)
            ranks_BHT = ranks.to(score.dtype).gather(-1, place.clamp(0, ranks.shape[-1] - 1))
            score = torch.where(scored, ranks_BHT, score)
        # fewer than two: by text order; then put scores back from text order into slots
        score = torch.where(partitions_BH1 < 2, rank.to(score.dtype), score)
        return torch.empty_like(score).scatter_(-1, order, score)

    def _rank_tokens(self, tensors: list[Tensor]) -> Tensor:
        """Rank tokens in each partition but the last, by deviation relative to the next one's range: [B,H,(P-1)*lag].

        `value` calls it. tensors: keys, values [B,H,P*lag,D] in text order, of P partitions of `lag` tokens.
        """
        shares = []
        for tensor in tensors:
            parts = tensor.to(accumulator(tensor.dtype)).unflatten(2, (-1, self.lag))
            low, high = (f(parts[:, :, 1:], dim=3, keepdim=True) for f in (torch.amin, torch.amax))
            scaled = (parts[:, :, :-1] - low) / (high - low).masked_fill(high == low, torch.inf)
            shares.append(scaled.std(-1).softmax(-1))
        return (shares[0] + shares[1]).argsort(dim=-1, stable=True).argsort(-1).flatten(2)


@dataclass(frozen=True)
class Leverage(Score):
    """Statistical leverage of keys [Compactor].

    Let X be the keys that a head holds, without their rotation, less their mean, times a matrix of `sketch` columns of normal
    numbers of variance 1 / `sketch`. s[i] = x_i^T (X^T X + 0.01 I)^-1 x_i.

    Differs from the paper: the ridge and the factorization are those of the code of kvpress, which then standardizes the
    scores; that changes no ranking.

    Attributes:
        sketch: columns of the random matrix.
    """

    sketch: int = 48
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    schedules: ClassVar[tuple[str, ...]] = ("prompt",)

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return (PlainKeys(),)

    def check(self) -> None:
        check_count("sketch", self.sketch, "columns")

    def value(self, context: EvictionContext) -> Tensor:
        return self._find_leverage(context, context.positions_BHT >= 0)

    def _find_leverage(self, context: EvictionContext, among_BHT: Tensor) -> Tensor:
        """Return, for `value` as a prompt ends, the leverage [B,H,T] of each key among those of `among_BHT`; 0 for others."""
        keys, real = context.view(PlainKeys), among_BHT[..., None]
        keys = keys.masked_fill(~real, 0.0)
        keys = (keys - keys.sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)).masked_fill(~real, 0.0)
        # float64: next to large keys float32 rounds the ridge away, and a singular matrix has no Cholesky factor
        sketched = (keys @ self._draw_sketch(context, *keys.shape[1::2]).to(keys.dtype)).double()
        ridge = _RIDGE * torch.eye(self.sketch, dtype=torch.float64, device=keys.device)
        # cholesky_ex does not raise: keys that are NaN give scores that are NaN
        factor = torch.linalg.cholesky_ex(sketched.transpose(-1, -2) @ sketched + ridge).L
        solved = torch.cholesky_solve(sketched.transpose(-1, -2), factor)
        return (sketched * solved.transpose(-1, -2)).sum(-1).clamp_min(0).to(keys.dtype)

    def _draw_sketch(self, context: EvictionContext, H: int, D: int) -> Tensor:
        """Draw a random matrix [D,sketch] for each head, by which `_find_leverage` shortens keys: always the same for a layer.

        Each entry's number follows from its head, row and column (`at`).
        """
        device = context.positions_BHT.device
        head, row = (torch.arange(n, device=device) for n in (H, D))
        at = context.parallel.first(H) + head[:, None, None], row[:, None], torch.arange(self.sketch, device=device)
        return noise.normal(noise.uniform(context.seed, context.layer, *at)) / math.sqrt(self.sketch)


_RIDGE = 1e-2


@dataclass(frozen=True)
class Compactor(Leverage):
    """Leverage of keys, blended with attention inside chunks [Compactor].

    Candidates are the tokens that are neither sinks nor protected recent ones. The prompt after the sinks is cut into chunks
    of `chunk` tokens. c[i] = the sum over all rows t of i's chunk of softmax(q_t . k_j)_i, the softmax over all tokens j of the
    chunk, later ones too; averaged over the query heads of the group. A token whose chunk was not read, such as a generated
    one, has 0. A[i] = the mean of c[j] * ||v_j||_2 over i and its neighbours among the candidates (beyond them it is 0), and
    L[i] = the leverage among the candidates (see Leverage). s[i] = z(A)[i] + blend * z(L)[i], z(x) = (x - mean) / standard
    deviation over the candidates of all heads of the layer.

    Differs from the paper: logits are not scaled, as in the authors' code for kvpress. That code blends by the share of tokens
    that are evicted unless told otherwise, and fills its last chunk up with keys of logit 0.

    Attributes:
        chunk: tokens of a chunk.
        blend: weight of the leverage.
    """

    chunk: int = 256
    blend: float = 0.35
    signed: ClassVar[bool] = True
    is_weight: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return PlainKeys(), Held(), ChunkAttention(self.chunk)

    def check(self) -> None:
        """Raise KVPatchError for an option out of range. `Policy.__post_init__` calls it."""
        super().check()
        check_count("chunk", self.chunk, "tokens")
        if not is_number(self.blend) or not 0 <= self.blend < math.inf:
            raise KVPatchError(f"blend={self.blend!r} must be a number, 0 or more, that the leverage is multiplied by.")

    def value(self, context: EvictionContext) -> Tensor:
        """Return the score [B,H,T]: attention inside chunks, smoothed, plus `blend` times the leverage of keys.

        `Policy.eviction_keys` calls it as a prompt ends. Both are standardized over the candidates: tokens that are neither
        sinks nor protected recent ones.
        """
        position = context.positions_BHT
        among = (position >= context.limits.first.clamp(min=0)) & (position <= context.recent_B11)  # the candidates
        attention = context.view(ChunkAttention)  # [B,H,T], inside chunks
        size = torch.linalg.vector_norm(context.view(Held)[1], dim=-1, dtype=attention.dtype)
        order, _ = sort_by_position(position)
        weight = (attention * size).masked_fill(~among, 0.0).gather(-1, order)
        weight = torch.empty_like(weight).scatter_(-1, order, F.avg_pool1d(weight, 3, stride=1, padding=1))
        leverage = _standardize_among(self._find_leverage(context, among), among, context.parallel)
        return _standardize_among(weight, among, context.parallel) + self.blend * leverage


def _standardize_among(x_BHT: Tensor, among_BHT: Tensor, everyone: Parallel) -> Tensor:
    """Scale a part of `Compactor.value` to mean 0, deviation 1 over tokens `among_BHT` of all heads.

    It does so as a prompt ends. everyone: the processes that share the layer's heads. They exchange scores: all must call this.
    """
    x = x_BHT.nan_to_num(0.0)  # one NaN would make all heads NaN
    among = everyone.gather_heads(among_BHT.to(x.dtype), empty=0)
    count, counted_x = among.sum((1, 2), keepdim=True), everyone.gather_heads(x, empty=0) * among
    mean = counted_x.sum((1, 2), keepdim=True) / count.clamp(min=1)
    variance = ((counted_x - mean).square() * among).sum((1, 2), keepdim=True) / (count - 1).clamp(min=1)
    return (x_BHT - mean) / variance.sqrt().clamp_min(1e-6)


def sort_by_position(positions_BHT: Tensor) -> tuple[Tensor, Tensor]:
    """Sort slots into text order, for scores of neighbours and `SlotLayer.pack`: indices [B,H,T], empty slots last.

    Also returns how many slots of each head hold a token, [B,H,1].
    """
    real = positions_BHT >= 0
    last = torch.iinfo(positions_BHT.dtype).max
    return positions_BHT.masked_fill(~real, last).argsort(-1), real.sum(-1, keepdim=True)
