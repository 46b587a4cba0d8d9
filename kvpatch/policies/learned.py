"""The score that a regression learned from second readings of the user's own text, and the features that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .calibration import CalibratedScore
from .context import EvictionContext, NewTokens, accumulator

LEAST = 1e-4
"""Added to the attention of a second reading before the logarithm: what is looked at less counts as little."""


def list_features(k_BHQD: Tensor, v_BHQD: Tensor, positions_BQ: Tensor) -> Tensor:
    """Return the features [B,H,Q,F] of tokens, for `Learned.entry` as they are cached, and for `kvpatch learn` to fit weights.

    Args:
        k_BHQD: keys, with or without their rotation.
        v_BHQD: values; F is their size and 4 more.
        positions_BQ: int64; -1 for padding.
    """
    k, v = (tensor.to(accumulator(tensor.dtype)) for tensor in (k_BHQD, v_BHQD))  # accumulator: at least float32
    log_position = positions_BQ.clamp(min=0).to(v.dtype).log1p()[:, None].expand(v.shape[:3])
    sizes = torch.linalg.vector_norm(k, dim=-1), torch.linalg.vector_norm(v, dim=-1)
    return torch.cat([v, torch.stack([*sizes, log_position, torch.ones_like(log_position)], -1)], -1)


def make_target(repeated_BHT: Tensor) -> Tensor:
    """Return the logarithms that `kvpatch learn` fits weights to, from the scores s of a second reading: log(s + 0.0001)."""
    return (repeated_BHT.double() + LEAST).log()


@dataclass(frozen=True)
class Learned(CalibratedScore):
    """Linear map of a token's value and norms, learned from second readings [KVzap].

    s[i] = w . (v_i, ||k_i||_2, ||v_i||_2, log(1 + i), 1), where i is the token's position and w are the weights of the KV
    head. They solve least squares for log(r[i] + 0.0001) over the tokens of a text read before, those after its sinks; r[i]
    is the score of `kvzip_plus` (see RepeatedOutputs), which reads the text a second time. With X these features, one row per
    token, S = diag(X^T X)^(1/2) (1 where that is 0) and y the logarithms,
    w = S^-1 (S^-1 X^T X S^-1 + 0.001 I)^-1 S^-1 X^T y.

    Differs from the paper: the map is of the value, two norms and the position, not of the hidden state. It is learned by
    least squares, in one pass over the user's own text. What stays is a budget, not what is above a threshold.

    Attributes:
        calibration: what `load_calibration` returns of a file that `kvpatch learn` wrote.
    """

    calibrated: ClassVar[tuple[str, ...]] = ("weight",)

    def entry(self, new: NewTokens) -> dict[str, Tensor]:
        """Return the learned score of each new token, w . features, to store with it, for `Policy.entry`."""
        weight_HF = self.read_calibration(new)
        return {"learned": (list_features(new.k_BHQD, new.v_BHQD, new.positions_BQ) @ weight_HF[None, :, :, None]).squeeze(-1)}

    def value(self, context: EvictionContext) -> Tensor:
        return context.state["learned"]
