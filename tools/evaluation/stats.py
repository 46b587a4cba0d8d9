"""Means with intervals, by a paired hierarchical bootstrap: trained models, then samples.

Training seeds differ more than policies do, so the model is the unit of replication: a draw takes trained models with
replacement within each recipe, then samples with replacement within each model taken. Recipes weigh the same, models weigh the
same within their recipe. All settings are read off the same draws, so a difference of two is paired. Draws of C models from C
spread too little by the root of (C - 1) / C, which is put right. With one model of a recipe the interval knows nothing of other
training seeds, and over one recipe of three it is still on the narrow side: see `carried`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

DRAWS, FLIPS = 2000, 8192
ZERO = 1e-9
"""What is nearer to zero than this is zero."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval, over `samples` samples of `models` models. signs: models above, below zero.

    p: of all ways to flip the signs of models' means the share that lie as far from zero; three models can say no less than a
    quarter.
    """

    mean: float
    low: float
    high: float
    samples: int
    models: int
    signs: tuple[int, int] = (0, 0)
    p: float = 1.0

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def carried(self) -> int:
        """+1 or -1: the interval leaves zero out, and of three models or more all but one in eight have that sign. Else 0."""
        if self.models < 3:
            return 0
        side = 1 if self.low > 0 else -1 if self.high < 0 else 0
        agreeing = self.signs[0 if side > 0 else 1]
        return side if agreeing >= self.models - self.models // 8 else 0


class Bootstrap:
    """Draws over a fixed layout of samples. models: of each sample, (recipe, model) in any order."""

    def __init__(self, models: Sequence[tuple[str, str]], draws: int = DRAWS, seed: int = 0) -> None:
        self.models = list(models)
        rows: dict[str, dict[str, list[int]]] = {}
        for at, (recipe, model) in enumerate(models):
            rows.setdefault(recipe, {}).setdefault(model, []).append(at)
        rng, total = np.random.default_rng(seed), len(self.models)
        self.weights_DS = np.zeros((draws, total))
        self.plain_S = np.zeros(total)
        self.by_model: dict[str, list[int]] = {}
        for recipe in sorted(rows):
            clusters = rows[recipe]
            chosen_DC = rng.integers(0, len(clusters), (draws, len(clusters)))
            for c, model in enumerate(sorted(clusters)):
                at, share = clusters[model], 1 / (len(rows) * len(clusters))
                self.by_model[model] = at
                self.plain_S[at] = share / len(at)
                # a model that is taken twice brings two draws of samples of its own
                for slot in range(len(clusters)):
                    taken = rng.multinomial(len(at), np.full(len(at), 1 / len(at)), size=draws) / len(at)
                    self.weights_DS[:, at] += share * taken * (chosen_DC[:, slot] == c)[:, None]
            if len(clusters) > 1:
                own = sorted(at for found in clusters.values() for at in found)
                wider = (len(clusters) / (len(clusters) - 1)) ** 0.5
                self.weights_DS[:, own] = self.plain_S[own] + wider * (self.weights_DS[:, own] - self.plain_S[own])

    def estimate(self, values_S: Sequence[float] | np.ndarray) -> Estimate:
        """The mean of one value per sample. A difference of two settings' values is a paired difference."""
        values = np.asarray(values_S, dtype=float)
        drawn_D = self.weights_DS @ values
        low, high = np.quantile(drawn_D, (0.025, 0.975))
        models = [values[at].mean() for at in self.by_model.values()]
        mean, parts_M = float(self.plain_S @ values), np.array([self.plain_S[at] @ values[at] for at in self.by_model.values()])
        p = float((np.abs(_flips(len(parts_M)) @ parts_M) >= abs(mean) - ZERO).mean())
        signs = sum(one > ZERO for one in models), sum(one < -ZERO for one in models)
        return Estimate(mean, float(low), float(high), len(values), len(models), signs, p)


@cache
def _flips(models: int) -> np.ndarray:
    """Signs [F, models], none flipped first: all of them for few models, else FLIPS drawn ones."""
    if 2**models <= FLIPS:
        return np.array(list(product((1.0, -1.0), repeat=models)))
    drawn = np.random.default_rng(0).choice((1.0, -1.0), (FLIPS, models))
    drawn[0] = 1.0
    return drawn


def holm(ps: Sequence[float]) -> list[float]:
    """The p-values of a family of comparisons, raised so that one in twenty families has any below 0.05 by luck [Holm 1979]."""
    raised, highest = [0.0] * len(ps), 0.0
    for rank, at in enumerate(sorted(range(len(ps)), key=lambda at: ps[at])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[at]))
        raised[at] = highest
    return raised
