"""Moments of a prompt's queries, from which the queries to come are foreseen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..context import EvictionContext
from .base import LayerRead, Need, Note, PromptRead
from .held import ROTATED


@dataclass
class Moments(Note):
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
        """Compute the moments of a prompt's queries where `counted_BQ` is True, for `QueryMoments.read`: number and mean.

        With `spread`, also the sum of outer products of deviations from the mean: the covariance times their number.
        """
        counted = counted_BQ[:, None, None, :, None].to(q_BHGQD.dtype)
        count = counted.sum(3, keepdim=True)
        mean = (q_BHGQD * counted).sum(3, keepdim=True) / count.clamp(min=1)
        deviation = (q_BHGQD - mean) * counted
        return cls(count, mean, deviation.transpose(-1, -2) @ deviation if spread else None)

    def join_parts(self, other: Moments) -> Moments:
        """Return the moments of both sets of queries, two pieces of a prompt in `QueryMoments.read` (Chan et al., 1979)."""
        total = self.count_B1111 + other.count_B1111
        share = other.count_B1111 / total.clamp(min=1)
        apart = other.mean_BHG1D - self.mean_BHG1D
        spread = None
        if self.spread_BHGDD is not None and other.spread_BHGDD is not None:
            between = apart.transpose(-1, -2) @ apart * (self.count_B1111 * share)
            spread = self.spread_BHGDD + other.spread_BHGDD + between
        return Moments(total, self.mean_BHG1D + apart * share, spread)

    def rotate_moments(self, rotation_B11DD: Tensor | None, factor: float, slopes_HG: Tensor | None) -> Queries:
        """Return mean and covariance of `factor` times the queries, rotated by each row's matrix to coming positions.

        `QueryMoments.view` calls it as a prompt ends. rotation_B11DD: the mean rotation of those positions; None: the model has
        none. slopes_HG: ALiBi's, for the result.
        """
        mean, spread = self.mean_BHG1D * factor, self.spread_BHGDD
        covariance = None if spread is None else spread / self.count_B1111.clamp(min=1) * factor**2
        if rotation_B11DD is not None:
            mean = mean @ rotation_B11DD
            covariance = None if covariance is None else rotation_B11DD.transpose(-1, -2) @ covariance @ rotation_B11DD
        return Queries(mean.squeeze(3), covariance, slopes_HG)


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


@dataclass(frozen=True)
class QueryMoments(Need[Queries]):
    """Distribution of the queries at the next positions: context.view(QueryMoments) returns Queries.

    The queries of the prompt (or of each block of it) are counted without their rotation and without those of the sinks.

    Attributes:
        future: coming positions whose rotations are averaged.
        covariance: False gathers the mean alone.
    """

    future: int
    covariance: bool = True
    name: ClassVar[str] = "moments"
    is_read: ClassVar[bool] = True

    @property
    def lookahead(self) -> int:
        return self.future

    @property
    def refuses(self) -> Mapping[str, str]:
        return ROTATED

    def read(self, prompt: PromptRead) -> None:
        """Add the queries of a prompt, or a piece of one, to the moments in the layer's notes. `read_prompt` calls it.

        They are counted without their rotation, in pieces of _AT_ONCE, and without padding and the sinks (first tokens).
        """
        layer = prompt.layer
        pieces = zip(prompt.q_BHGQD.detach().split(_AT_ONCE, 3), prompt.positions_BQ.split(_AT_ONCE, 1), strict=True)
        for q, positions in pieces:
            counted = positions >= prompt.sinks  # padding is at -1
            unrotated = layer.rotated_back(q.flatten(1, 2), positions[:, None]).view(q.shape)
            new, earlier = Moments.of(unrotated, counted, spread=self.covariance), layer.notes.get(self.name)
            layer.notes[self.name] = new if earlier is None else earlier.join_parts(new)

    def view(self, context: EvictionContext) -> Queries:
        """Return the moments of queries at coming positions, for `ExpectedAttention.value` as a prompt ends."""
        layer = context.layer_read
        moments = layer.notes[self.name]
        rotation_B11DD = layer.mean_rotation(self.future, moments.mean_BHG1D)
        return moments.rotate_moments(rotation_B11DD, layer.scale, layer.slopes_HG)

    def end(self, layer: LayerRead, state: dict[str, Tensor], evicts: bool) -> None:
        layer.notes.pop(self.name, None)


_AT_ONCE = 2048  # queries that are held without rotation at a time


def mean_rotation(rotate: Callable[[Tensor, Tensor], Tensor], places_BF: Tensor, like: Tensor) -> Tensor:
    """Return the mean [B,1,D,D] of the rotations at positions `places_BF`: row d is what the d-th unit vector becomes.

    `Call.mean_rotation` asks for coming positions as a prompt ends, `kvpatch calibrate` for single ones. F: positions. rotate:
    applies positions [B,1,F] to vectors [B,D,F,D]. like: for dtype, device and D.
    """
    (B, F), D = places_BF.shape, like.shape[-1]
    unit = torch.eye(D, dtype=like.dtype, device=like.device)[None, :, None]
    total = unit.new_zeros(B, D, D)
    for places in places_BF.split(_ROTATED_AT_ONCE, 1):
        total += rotate(unit.expand(B, D, places.shape[1], D), places[:, None]).sum(2)
    return (total / F)[:, None]


_ROTATED_AT_ONCE = 64  # positions whose rotations are held at a time
