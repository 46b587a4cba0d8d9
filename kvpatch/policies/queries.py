"""Moments of queries: what scores that foresee attention know of a prompt's queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moments:
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

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> Moments:
        """Apply `change`, which acts along the batch axis, to every tensor."""
        spread = None if self.spread_BHGDD is None else change(self.spread_BHGDD)
        return Moments(change(self.count_B1111), change(self.mean_BHG1D), spread)


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
