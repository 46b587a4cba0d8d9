"""Queries that scores know: moments of a prompt's, the last ones of a layer, and those of a chunk with their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .batched import Batched


@dataclass
class Moments(Batched):
    """Mean and covariance of queries without their rotation, gathered block after block.

    Attributes:
        count_B1111: queries counted per head, in the moments' dtype.
        mean_BHG1D: their mean; 0 where none was counted.
        spread_BHGDD: sum of the outer products of their deviations from the mean; None if only the mean is wanted.
    """

    count_B1111: Tensor
    mean_BHG1D: Tensor
    spread_BHGDD: Tensor | None

    @classmethod
    def of(cls, q_BHGQD: Tensor, counted_BQ: Tensor, spread: bool) -> Moments:
        """Return the moments of the queries at the columns `counted_BQ`, in the dtype of the queries."""
        counted = counted_BQ[:, None, None, :, None].to(q_BHGQD.dtype)
        count = counted.sum(3, keepdim=True)
        mean = (q_BHGQD * counted).sum(3, keepdim=True) / count.clamp(min=1)
        deviation = (q_BHGQD - mean) * counted
        return cls(count, mean, deviation.transpose(-1, -2) @ deviation if spread else None)

    def joined(self, other: Moments) -> Moments:
        """Return the moments of the queries of both (Chan, Golub and LeVeque, 1979)."""
        total = self.count_B1111 + other.count_B1111
        share = other.count_B1111 / total.clamp(min=1)
        apart = other.mean_BHG1D - self.mean_BHG1D
        spread = None
        if self.spread_BHGDD is not None and other.spread_BHGDD is not None:
            between = apart.transpose(-1, -2) @ apart * (self.count_B1111 * share)
            spread = self.spread_BHGDD + other.spread_BHGDD + between
        return Moments(total, self.mean_BHG1D + apart * share, spread)

    def rotated(self, rotation_B11DD: Tensor | None, factor: float) -> Queries:
        """Return the mean and the covariance of `factor` times the queries, turned by a matrix for each batch row."""
        mean, spread = self.mean_BHG1D * factor, self.spread_BHGDD
        covariance = None if spread is None else spread / self.count_B1111.clamp(min=1) * factor**2
        if rotation_B11DD is not None:
            mean = mean @ rotation_B11DD
            covariance = None if covariance is None else rotation_B11DD.transpose(-1, -2) @ covariance @ rotation_B11DD
        return Queries(mean.squeeze(3), covariance)


@dataclass
class Queries:
    """Distribution of the queries to come, at the mean rotation of their positions, such that q . k is a logit.

    Attributes:
        mean_BHGD: their mean.
        covariance_BHGDD: their covariance; None if the score wants the mean alone.
        slopes_HG: ALiBi's slopes; None without ALiBi.
    """

    mean_BHGD: Tensor
    covariance_BHGDD: Tensor | None
    slopes_HG: Tensor | None = None


@dataclass
class Recent(Batched):
    """The last W queries of a layer. The query at position p lies in column p modulo W, so that no counter says where.

    Attributes:
        q_BHGWD: the queries as attention used them; without positions if these are renumbered.
        positions_BW: their positions, int64; -1 where there is none yet.
    """

    q_BHGWD: Tensor
    positions_BW: Tensor

    @classmethod
    def none(cls, width: int, like_BHGQD: Tensor, dtype: torch.dtype) -> Recent:
        """Return a record of no queries."""
        (B, H, G, _, D), device = like_BHGQD.shape, like_BHGQD.device
        positions = torch.full((B, width), -1, dtype=torch.long, device=device)
        return cls(torch.zeros(B, H, G, width, D, dtype=dtype, device=device), positions)

    def read(self, q_BHGQD: Tensor, positions_BQ: Tensor) -> Recent:
        """Return the record after a prompt, or a piece of one; -1 in `positions_BQ` is padding."""
        W = self.positions_BW.shape[1]
        positions, index = positions_BQ.topk(min(W, positions_BQ.shape[1]), dim=1)
        q = q_BHGQD.gather(3, index[:, None, None, :, None].expand(*q_BHGQD.shape[:3], -1, q_BHGQD.shape[-1]))
        known = (positions >= 0) & (positions > positions.amax(1, keepdim=True) - W)
        column = torch.where(known, positions % W, W)  # a column more, which is cut off again
        wide = Recent(F.pad(self.q_BHGWD, (0, 0, 0, 1)), F.pad(self.positions_BW, (0, 1)))
        wide.write(column, q, positions)
        return Recent(wide.q_BHGWD[:, :, :, :W].contiguous(), wide.positions_BW[:, :W].contiguous())

    def write(self, column_BQ: Tensor, q_BHGQD: Tensor, positions_BQ: Tensor) -> None:
        """Write queries into their columns, in place."""
        at = column_BQ[:, None, None, :, None].expand(q_BHGQD.shape)
        self.q_BHGWD.scatter_(3, at, q_BHGQD.to(self.q_BHGWD.dtype))
        self.positions_BW.scatter_(1, column_BQ, positions_BQ)

    def step(self, q_BHGD: Tensor, positions_B1: Tensor, undone: bool) -> tuple[Tensor, Tensor, Tensor] | None:
        """Write a decode step's query; return what `write` needs to undo that, if it may be undone."""
        column, old = positions_B1 % self.positions_BW.shape[1], None
        if undone:
            at = column[:, None, None, :, None].expand(*q_BHGD.shape[:3], 1, q_BHGD.shape[-1])
            old = column, self.q_BHGWD.gather(3, at), self.positions_BW.gather(1, column)
        self.write(column, q_BHGD[:, :, :, None], positions_B1)
        return old

    @classmethod
    def cat(cls, parts: Sequence[Recent]) -> Recent:
        """Concatenate the rows of several records."""
        return cls(torch.cat([part.q_BHGWD for part in parts]), torch.cat([part.positions_BW for part in parts]))


@dataclass
class Local(Batched):
    """Rows of chunks that are not complete: queries, keys, positions (-1 for none) and columns of the layer's slots."""

    q_BHGCD: Tensor
    k_BHCD: Tensor
    positions_BC: Tensor
    columns_BC: Tensor

    def joined(self, later: Local) -> Local:
        """Return these rows and later ones."""
        axes = ("q_BHGCD", 3), ("k_BHCD", 2), ("positions_BC", 1), ("columns_BC", 1)
        return Local(*(torch.cat([getattr(self, name), getattr(later, name)], axis) for name, axis in axes))

    def taken(self, at_BM: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries [B,H,G,M,D] and keys [B,H,M,D] at these columns of each row."""
        b = torch.arange(len(at_BM), device=at_BM.device)[:, None]
        return self.q_BHGCD.movedim(3, 1)[b, at_BM].movedim(1, 3), self.k_BHCD.movedim(2, 1)[b, at_BM].movedim(1, 2)

    def newest(self, count: int, start_B1: Tensor) -> Local:
        """Return the `count` newest rows at positions from `start_B1`, which may have another number for each text."""
        at = self.positions_BC.topk(min(count, self.positions_BC.shape[1]), dim=1).indices.sort(1).values
        positions = self.positions_BC.gather(1, at)
        positions = positions.masked_fill(positions < start_B1, -1)
        return Local(*self.taken(at), positions, self.columns_BC.gather(1, at))


@dataclass
class Looks:
    """Logits of the last queries, for the tokens before these queries' own.

    Attributes:
        x_BHGWT: logits; the least number of their dtype where the token is no candidate, or is outside the sliding window.
        candidate_BHT: bool, the tokens before.
    """

    x_BHGWT: Tensor
    candidate_BHT: Tensor

    def mean(self, p_BHWT: Tensor) -> Tensor:
        """Return the mean over the queries, 0 for tokens that are no candidates, [B,H,T]."""
        return p_BHWT.mean(2).masked_fill(~self.candidate_BHT, 0.0)


def mean_rotation(rotate: Callable[[Tensor, Tensor], Tensor], places_BF: Tensor, like: Tensor) -> Tensor:
    """Return the mean [B,1,D,D] of the rotations at positions `places_BF`: row d is what the d-th unit vector becomes.

    rotate: applies positions [B,1,F] to vectors [B,D,F,D]. like: for dtype, device and D.
    """
    (B, F), D = places_BF.shape, like.shape[-1]
    unit = torch.eye(D, dtype=like.dtype, device=like.device)[None, :, None]
    total = unit.new_zeros(B, D, D)
    for places in places_BF.split(_AT_ONCE, 1):
        total += rotate(unit.expand(B, D, places.shape[1], D), places[:, None]).sum(2)
    return (total / F)[:, None]


_AT_ONCE = 64  # positions whose rotations are held at a time
