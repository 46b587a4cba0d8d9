"""Scores that foresee attention from the distribution of a prompt's queries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import KVPatchError
from .budgets import check_count, is_number
from .context import EvictionContext, accumulator
from .needs import AnyNeed, Held, Queries, QueryMoments
from .scores import Score


@dataclass(frozen=True)
class ExpectedAttention(Score):
    """Attention that the coming queries are expected to give [Expected Attention].

    The queries of the prompt, without their rotation and without those of the sinks, have mean m and covariance C. Let R be
    the mean rotation of the next `future` positions. A query to come is taken as normal with mean R m and covariance R C R^T,
    so the expectation of exp(q . k_i * scale) is exp(x_i) with x_i = k_i . (R m) * scale + k_i^T (R C R^T) k_i * scale^2 / 2.

    s[i] = (softmax(x)_i + eps) * ||v_i||_2, the softmax over the held tokens after the sinks, averaged over the group.

    If a prompt is read in blocks, the queries are those of each block. With ALiBi, x_i has the slope times i added; positions
    that are inside the hidden state stay in the queries.

    Differs from the paper: the score is multiplied by the norm of the value rather than of its projection, as in the code of
    kvpress.

    Attributes:
        future: coming positions whose rotations are averaged.
        eps: added to the expected attention, so that values count where none is expected.
        covariance: False takes the mean query alone.
    """

    future: int = 512
    eps: float = 0.0
    covariance: bool = True
    signed: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    schedules: ClassVar[tuple[str, ...]] = ("prompt",)

    @property
    def needs(self) -> tuple[AnyNeed, ...]:
        return Held(), QueryMoments(self.future, self.covariance)

    def check(self) -> None:
        """Raise KVPatchError for an option out of range. `Policy.__post_init__` calls it."""
        check_count("future", self.future, "positions")
        if not is_number(self.eps) or not 0 <= self.eps < math.inf:
            raise KVPatchError(f"eps={self.eps!r} must be a number, 0 or more, that is added to the expected attention.")
        if not isinstance(self.covariance, bool):
            raise KVPatchError(f"covariance={self.covariance!r} must be True, or False for the mean query alone.")

    def value(self, context: EvictionContext) -> Tensor:
        """Return (attention expected of coming queries + eps) * norm of the value, [B,H,T].

        `Policy.eviction_keys` calls it as a prompt ends. Views: Held gives keys and values, QueryMoments a mean and covariance.
        """
        keys, values = context.view(Held)  # of the slots [B,H,T,D]
        dtype = accumulator(keys.dtype)
        # sinks are kept in any case; empty slots are at position -1
        outside = context.positions_BHT < context.limits.first
        expected = _expect_attention(context.view(QueryMoments), keys.to(dtype), context, outside)
        return (expected + self.eps) * torch.linalg.vector_norm(values, dim=-1, dtype=dtype)


def _expect_attention(queries: Queries, keys_BHTD: Tensor, context: EvictionContext, outside: Tensor) -> Tensor:
    """Return, for `ExpectedAttention.value`, the attention [B,H,T] expected of coming queries, the mean over a group's heads.

    queries: their mean and covariance, already scaled; slopes are ALiBi's. outside: True at sinks and empty slots, which get
    0; a row that is all outside becomes uniform, and has nothing to rank.
    """
    total = torch.zeros_like(keys_BHTD[..., 0])
    for g in range(context.group):  # one query head at a time holds one matrix of the keys' size
        x = (keys_BHTD @ queries.mean_BHGD[:, :, g, :, None]).squeeze(-1)
        if queries.covariance_BHGDD is not None:
            x += ((keys_BHTD @ queries.covariance_BHGDD[:, :, g]) * keys_BHTD).sum(-1) / 2
        if queries.slopes_HG is not None:
            x += queries.slopes_HG[None, :, g, None] * (context.positions_BHT - context.newest_B11)
        # the least number rather than -inf: a row that has only sinks is not NaN
        total += x.masked_fill(outside, torch.finfo(x.dtype).min).softmax(-1)
    return total / context.group
