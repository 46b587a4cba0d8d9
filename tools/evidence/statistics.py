"""Means over samples with intervals, and paired comparisons corrected for their number, all of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 4000


@dataclass(frozen=True)
class Estimate:
    """A mean over samples with its 95% interval (bootstrap over samples, percentiles)."""

    mean: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate a mean. Differences of two settings, sample by sample, give a paired difference."""
    array = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(0).integers(0, len(array), (DRAWS, len(array)))
    low, high = np.quantile(array[drawn].mean(1), (0.025, 0.975))
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def compare_with_zero(differences: Sequence[float]) -> float:
    """Return p of a paired permutation test that the mean difference is 0: signs flipped at random."""
    array = np.asarray(differences, dtype=float)
    if not array.any():
        return 1.0
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (DRAWS * 5, len(array)))
    as_far = np.abs((signs * array).mean(1)) >= abs(array.mean()) - 1e-12
    return float((as_far.sum() + 1) / (len(as_far) + 1))


def correct_holm(ps: Sequence[float]) -> list[float]:
    """Raise p-values of a family of comparisons so that the chance of any false one is below the level [Holm 1979]."""
    order, raised, highest = np.argsort(ps), [0.0] * len(ps), 0.0
    for rank, at in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[at]))
        raised[at] = highest
    return raised
